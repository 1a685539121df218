"""The gated delta rule, which most layers of Qwen3.5 and Qwen3-Next are, as one operation.

mlx-lm has a kernel for it on Metal. Elsewhere it goes token by token through a dozen operations,
each of which reads and writes the states of all heads. :func:`install` puts this module's function
in the place of those: on the CPU and on CUDA it is one kernel for all tokens.

Ours is for float16, bfloat16 or float32 with a decay for each head and states in float32, head
sizes multiples of 32 up to 256 and of 16. Everything else goes to mlx-lm's own. States are the same
to rounding; outputs are rounded once.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import gated_delta as theirs

from . import _ext

__all__ = ["gated_delta_ops", "install"]

_mlx_gated_delta_ops = theirs.gated_delta_ops


def gated_delta_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As ``mlx_lm.models.gated_delta.gated_delta_ops`` (arXiv:2412.06464).

    Parameters
    ----------
    q, k : array, [B, T, Hk, D]
        Normalised; ``q`` with the scale of outputs.
    v : array, [B, T, Hv, R]
    g : array, [B, T, Hv] or [B, T, Hv, D]
        What is left of a state after a token, from 0 to 1.
    beta : array, [B, T, Hv]
        How much of the new value a token writes.
    state : array, [B, Hv, R, D], optional
        Zeros unless given.
    mask : array, [B, T], optional
        Tokens that count. Others leave the state as it is.

    Returns
    -------
    tuple of array
        Outputs, [B, T, Hv, R], and the state after the last token.
    """
    if state is None:
        B, _, Hv, R = v.shape
        state = mx.zeros((B, Hv, R, k.shape[-1]), mx.float32)
    out = _ext.gated_delta(q, k, v, g, beta, state, mask)
    return _mlx_gated_delta_ops(q, k, v, g, beta, state, mask) if out is None else out


def install() -> None:
    """Replace mlx-lm's function by this module's. Calling it again changes nothing."""
    theirs.gated_delta_ops = gated_delta_ops
