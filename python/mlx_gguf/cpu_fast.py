"""Normalisation, rotary positions, attention and others on the CPU, each as one operation.

MLX has no CPU kernels for ``mx.fast.rms_norm``, ``mx.fast.rope`` and
``mx.fast.scaled_dot_product_attention``. There it spells them in about 8, 15 and 12 small
operations, each a graph node of several microseconds and on one thread; for a small model that
is most of the time of a token. ``mx.logsumexp``, which mlx-lm takes of every token's logits, and
the activations ``nn.silu`` and ``nn.gelu_approx`` go number by number there. :func:`install` puts
the functions of this module in their place.

Each is ours on a CPU stream and with arguments that our kernels take: float16, bfloat16 or
float32, attention without sinks. Everything else, and every wrong argument, goes to MLX's own
function, as do derivatives and ``vmap``. Ours compute in float32 and round once, where MLX
rounds in between, so results differ by that rounding. They do not depend on the number of
threads.

:func:`mlx_gguf.load` installs them if the default device is the CPU; ``MLX_GGUF_CPU_FAST=0`` in
the environment keeps MLX's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import _ext

__all__ = [
    "gelu_approx",
    "install",
    "logsumexp",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "silu",
]

_mlx_rms_norm = mx.fast.rms_norm
_mlx_rope = mx.fast.rope
_mlx_attention = mx.fast.scaled_dot_product_attention
_mlx_logsumexp = mx.logsumexp
_mlx_silu = nn.silu
_mlx_gelu_approx = nn.gelu_approx
_gate = _ext.cpu_gate
_logsumexp = _ext.cpu_logsumexp
_rms_norm = _ext.cpu_rms_norm
_rope = _ext.cpu_rope
_attention = _ext.cpu_attention


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    """As ``mx.fast.rms_norm``."""
    y = _rms_norm(x, weight, eps, stream)
    return _mlx_rms_norm(x, weight, eps, stream=stream) if y is None else y


def rope(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    """As ``mx.fast.rope``."""
    y = _rope(a, dims, traditional, base, scale, offset, freqs, stream)
    if y is not None:
        return y
    return _mlx_rope(
        a,
        dims,
        traditional=traditional,
        base=base,
        scale=scale,
        offset=offset,
        freqs=freqs,
        stream=stream,
    )


def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    force_fused: bool = False,
    stream: Any = None,
) -> mx.array:
    """As ``mx.fast.scaled_dot_product_attention``."""
    if sinks is None and not force_fused:
        y = None
        if not isinstance(mask, str):
            y = _attention(q, k, v, scale, False, mask, stream)
        elif mask == "causal":
            y = _attention(q, k, v, scale, True, None, stream)
        if y is not None:
            return y
    return _mlx_attention(
        q,
        k,
        v,
        scale=scale,
        mask=mask,
        sinks=sinks,
        force_fused=force_fused,
        stream=stream,
    )


def logsumexp(
    a: mx.array,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    *,
    stream: Any = None,
) -> mx.array:
    """As ``mx.logsumexp``; ours is over the last axis, or over all if the others are 1 long."""
    if isinstance(a, mx.array) and a.ndim > 0:
        whole = axis is None and a.size == a.shape[-1]
        if whole or axis == -1 or axis == a.ndim - 1:
            y = _logsumexp(a, stream)
            if y is not None:
                return y if keepdims else mx.squeeze(y, None if whole else -1, stream=stream)
    return _mlx_logsumexp(a, axis, keepdims, stream=stream)


def silu(x: mx.array) -> mx.array:
    """As ``nn.silu``."""
    y = _gate(x, False)
    return _mlx_silu(x) if y is None else y


def gelu_approx(x: mx.array) -> mx.array:
    """As ``nn.gelu_approx``."""
    y = _gate(x, True)
    return _mlx_gelu_approx(x) if y is None else y


def install() -> bool:
    """Replace MLX's functions in ``mx.fast``, ``mx`` and ``mlx.nn`` by those of this module.

    Calling it again changes nothing.

    Returns
    -------
    bool
        Whether they are in place: not with ``MLX_GGUF_CPU_FAST=0`` in the environment.
    """
    if os.environ.get("MLX_GGUF_CPU_FAST") == "0":
        return False
    for function in (rms_norm, rope, scaled_dot_product_attention):
        setattr(mx.fast, function.__name__, function)
    mx.logsumexp = logsumexp  # type: ignore[assignment]
    for activation in (silu, gelu_approx):
        setattr(nn, activation.__name__, activation)
    return True
