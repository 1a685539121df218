"""What a result must be, judged in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
#: Bounds of the relative error of a result before it is rounded to the output's dtype. Integer
#: dot products may take 16-bit floats as fixed point of 16 bits.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 3e-5, mx.bfloat16: 3e-5}
#: Whether the operations run on a GPU here, which promises less than the CPU does.
ON_GPU = mx.default_device().type == mx.gpu
# Results whose norm cannot cancel: a relative error is asked of these alone. Smaller ones are
# judged number by number, and the tests show them to equal parts of larger ones to the bit.
_MANY = 64
# Significant bits, least exponent of a subnormal's last bit, largest finite number.
_FLOATS = {
    mx.float32: (24, -149, float(np.finfo(np.float32).max)),
    mx.float16: (11, -24, 65504.0),
    mx.bfloat16: (8, -133, float.fromhex("0x1.fep127")),
}


def rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Round float64 once, to the nearest (even) number of `dtype`."""
    bits, least, largest = _FLOATS[dtype]
    exponent = np.maximum(np.frexp(values)[1] - bits, least)
    out = np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent)
    return np.where(np.abs(out) > largest, np.copysign(np.inf, out), out)


def float64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def activations(
    shape: tuple[int, ...], dtype: mx.Dtype, rng: np.random.Generator
) -> tuple[mx.array, np.ndarray]:
    """Random numbers in [-1, 1] of a dtype, and the same numbers in float64."""
    x = mx.array(rng.uniform(-1, 1, shape).astype(np.float32)).astype(dtype)
    return x, float64(x)


def relative_error(y: np.ndarray, ref: np.ndarray) -> float:
    """L2 norm of the error over that of the reference."""
    norm = np.linalg.norm(ref)
    return float(np.linalg.norm(y - ref) / norm) if norm else float(np.abs(y).sum())


def magnitudes(X: np.ndarray, W: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Sums of the magnitudes of what a product X @ W adds up, in float64, for `interval`.

    X may be taken as fixed point of 24 bits, whose steps are 2**-23 of the largest value (of 16-bit
    floats 16 and 2**-15): below that share of it, a value's own size does not bound its rounding.
    """
    share = (2.0**-23 if dtype == mx.float32 else 2.0**-15) / TOLERANCE[dtype]
    sizes = np.abs(X)
    if X.size:
        sizes = np.maximum(sizes, min(share, 1) * sizes.max(-1, keepdims=True))
    return sizes @ np.abs(W)


def interval(ref: np.ndarray, terms: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """What a sum, rounded once to `dtype`, may be.

    Parameters
    ----------
    ref : float64, the exact result
    terms : float64, sums of the magnitudes of what was added up. The sum lies within TOLERANCE
        of them (and a few subnormals), so its rounding lies between those of the ends of that
        interval.

    Returns
    -------
    float64 ``[3, ...]``: the exact result, the least and the greatest that it may come out as.
    """
    slack = TOLERANCE[dtype] * terms + 4096 * 2.0**-149
    return np.stack([ref, rounded(ref - slack, dtype), rounded(ref + slack, dtype)])


def check(y: mx.array, expected: np.ndarray, where: str, *, relative: bool = True) -> None:
    """Assert that `y` lies in an `interval`; `where` names the case in a failure.

    relative: ask for the relative error of the whole, too. Not where extreme weights let one
    result outweigh the others, for that one may cancel.
    """
    ref, low, high = expected
    assert y.shape == ref.shape, f"{where}: shape {y.shape}, not {ref.shape}"
    got = float64(y)
    right = (low <= got) & (got <= high)
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise AssertionError(
            f"{where}: {(~right).sum()} of {ref.size} wrong; first at {at}: {got[at]!r}, not "
            f"{ref[at]!r} in [{low[at]!r}, {high[at]!r}]"
        )
    if relative and y.dtype == mx.float32 and y.size >= _MANY:
        error = relative_error(got, ref)
        assert error <= TOLERANCE[y.dtype], f"{where}: relative error {error}"


def bits(a: mx.array) -> np.ndarray:
    """The array's bits, for exact comparison (NaN included)."""
    return np.array(mx.view(mx.contiguous(a), mx.uint8))
