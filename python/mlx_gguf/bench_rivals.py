"""MLX's own products as rivals in :mod:`mlx_gguf.bench`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from . import _ext
from .bench import Contender, Launch, MLXLaunch, checked_rows, count_copies
from .reference import RandomWeights, activations, float64
from .roofline import Device
from .tune import Matrix

__all__ = ["RIVALS", "contender"]

# A rival whose product takes longer is skipped: the others' figures would wait for it.
_LONGEST_SECONDS = 1.0
# Its time is guessed from this part of the rows of weights.
_PART = 16
_CHECKED_OUTPUTS = 256


@dataclass(frozen=True)
class Rival:
    """A way to multiply with numbers that were something else in a file.

    Attributes
    ----------
    kernel, weights : str
        As in :class:`mlx_gguf.bench.Row`.
    store : callable
        Makes the arrays of its weights from dense ones.
    restore : callable
        The dense weights in those arrays.
    product : callable
        Of x and those arrays.
    dtype : str or None
        Of x, where it must be one.
    """

    kernel: str
    weights: str
    store: Callable[..., tuple[mx.array, ...]]
    restore: Callable[..., mx.array]
    product: Callable[..., mx.array]
    dtype: str | None = None


def _affine(group_size: int) -> Rival:
    def product(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, stream: mx.Device
    ) -> mx.array:
        return mx.quantized_matmul(
            x, w, scales, biases, group_size=group_size, bits=4, stream=stream
        )

    return Rival(
        "mx.quantized_matmul",
        f"4-bit g{group_size}",
        partial(mx.quantize, group_size=group_size, bits=4),
        partial(mx.dequantize, group_size=group_size, bits=4),
        product,
    )


def _dense(dtype: str) -> Rival:
    return Rival(
        "mx.matmul",
        dtype,
        lambda w, stream: (w.astype(getattr(mx, dtype), stream=stream),),
        lambda w, stream: w,
        lambda x, w, stream: mx.matmul(x, mx.swapaxes(w, 0, 1, stream=stream), stream=stream),
        dtype,
    )


RIVALS = (_affine(32), _affine(64), _dense("float16"), _dense("bfloat16"))


def contender(
    rival: Rival, matrix: Matrix, weights: RandomWeights, dtype: str, M: int, device: Device
) -> Contender | str:
    """A rival with copies of its weights, or why it is not to be measured."""
    stream = device.stream
    dense = mx.array(weights.packed)
    dense = _ext.dequantize(dense, matrix.qtype, getattr(mx, dtype), stream=stream)
    stored = rival.store(dense, stream=stream)
    x, x64 = activations((M, dense.shape[1]), dtype, np.random.default_rng(0), normal=True)
    mx.eval(x, stored)
    if (seconds := _guess(rival, x, stored, stream)) > _LONGEST_SECONDS:
        return f"one product would take about {seconds:.1f} s"
    nbytes = sum(a.nbytes for a in stored)
    # Adding zero makes another array; MLX's ways of copying may share.
    copies = [
        stored,
        *(
            tuple(mx.add(a, 0, stream=stream) for a in stored)
            for _ in range(count_copies(nbytes) - 1)
        ),
    ]
    mx.eval(copies)
    at = mx.array(checked_rows(M))
    outputs = mx.array(np.linspace(0, dense.shape[0] - 1, _CHECKED_OUTPUTS).astype(np.int32))
    own = rival.restore(*(a[outputs] for a in stored), stream=mx.cpu)
    ref = x64[checked_rows(M)] @ float64(own).T

    def prepare(numbers: Sequence[int]) -> Launch:
        return MLXLaunch([rival.product(x, *copies[i], stream=stream) for i in numbers])

    def error(y: mx.array) -> float:
        got = float64(mx.take(y[at], outputs, axis=1))
        return float(np.linalg.norm(got - ref) / np.linalg.norm(ref))

    return Contender(rival.kernel, rival.weights, dtype, nbytes, copies, prepare, error)


def _guess(rival: Rival, x: mx.array, stored: Sequence[mx.array], stream: mx.Device) -> float:
    """About how long a product takes, from one with few of the rows."""
    rows = max(1, len(stored[0]) // _PART)
    part = [mx.contiguous(a[:rows], stream=stream) for a in stored]
    mx.eval(part)
    start = time.perf_counter()
    mx.eval(rival.product(x, *part, stream=stream))
    return (time.perf_counter() - start) * len(stored[0]) / rows
