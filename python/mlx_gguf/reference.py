"""Random packed weights and what products with them are, in float64, from gguf-py.

An oracle to judge kernels by on any machine: it shares no code with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from . import _ext

__all__ = [
    "DTYPES",
    "RandomWeights",
    "Verdict",
    "activations",
    "decode",
    "float64",
    "judge",
    "same_bits",
    "tolerance",
]

#: Half a unit in the last place and the smallest subnormal number of each dtype of activations.
DTYPES = {
    "float32": (2.0**-24, 2.0**-149),
    "float16": (2.0**-11, 2.0**-24),
    "bfloat16": (2.0**-8, 2.0**-133),
}
_POOL = 256
# A block serves if the root mean square of its weights is in this range: random bytes also
# make infinite scales, and blocks so much larger than others that nothing else would count.
_SIZES = (2.0**-6, 2.0**2)


def decode(packed: np.ndarray, qtype: str) -> np.ndarray:
    """The weights of packed blocks ``[..., row_bytes]`` as float64 ``[..., K]``."""
    with np.errstate(all="ignore"):
        return dequantize(packed, GGMLQuantizationType[qtype.upper()]).astype(np.float64)


class RandomWeights:
    """Random weights of a type.

    They are made of 256 random blocks in random order, which makes exact products cheap for
    matrices of any size.

    Attributes
    ----------
    packed : ndarray
        uint8 ``[..., N, row_bytes]``.
    """

    def __init__(self, qtype: str, shape: tuple[int, ...], rng: np.random.Generator):
        *rows, K = shape
        format = _ext.find_format(qtype)
        assert format is not None
        if K % format.block_size:
            raise ValueError(
                f"[random_weights] Expected K divisible by {format.block_size} for {qtype}. "
                f"Received {K}."
            )
        blocks = _random_blocks(qtype, format.block_bytes, rng)
        self._values = decode(blocks, qtype)
        self._order = rng.integers(0, _POOL, (*rows, K // format.block_size), np.uint8)
        self.packed = blocks[self._order].reshape(*rows, -1)

    def values(self) -> np.ndarray:
        """The weights, float64 ``[..., N, K]``."""
        return self._values[self._order].reshape(*self._order.shape[:-1], -1)

    def product(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``x @ W.T`` for float64 x ``[M, K]``, and the sums of the terms' magnitudes."""
        pieces = x.reshape(len(x), self._order.shape[-1], -1)
        return self._sums(pieces, self._values), self._sums(abs(pieces), abs(self._values))

    def _sums(self, pieces: np.ndarray, values: np.ndarray) -> np.ndarray:
        # What each block of the pool adds to a sum at each place along K.
        sums = np.einsum("mbi,pi->mbp", pieces, values)
        place = np.arange(pieces.shape[1])
        return np.stack([row[place, self._order].sum(-1) for row in sums])


def _random_blocks(qtype: str, nbytes: int, rng: np.random.Generator) -> np.ndarray:
    found = np.empty((0, nbytes), np.uint8)
    while len(found) < _POOL:
        blocks = rng.integers(0, 256, (16 * _POOL, nbytes), np.uint8)
        with np.errstate(all="ignore"):
            size = np.sqrt(np.mean(decode(blocks, qtype) ** 2, -1))
        found = np.concatenate([found, blocks[(size >= _SIZES[0]) & (size <= _SIZES[1])]])
    return found[:_POOL]


def activations(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator, *, normal: bool = False
) -> tuple[mx.array, np.ndarray]:
    """Random numbers of a dtype, and the same numbers in float64.

    In [-1, 1], or standard normal ones, whose blocks have largest values of all sizes as those of
    a model do; the CPU's kernels need more bits for a block whose largest is just below 1.
    """
    numbers = rng.standard_normal(shape) if normal else rng.uniform(-1, 1, shape)
    x = mx.array(numbers.astype(np.float32), getattr(mx, dtype))
    return x, float64(x)


def tolerance(qtype: str, dtype: str, backend: str) -> float:
    """The relative error that a product may have before it is rounded to `dtype`.

    The format's; 3e-5 for 16-bit x on the CPU, which may take it as fixed point of 16 bits.
    """
    format = _ext.find_format(qtype)
    assert format is not None
    return 3e-5 if backend == "cpu" and dtype != "float32" else format.tolerance


def float64(a: mx.array) -> np.ndarray:
    """An array's numbers in float64."""
    return np.array(a.astype(mx.float32, stream=mx.cpu)).astype(np.float64)


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays of numbers of 16 or 32 bits are equal to the bit."""
    # Where they are: what the host reads of a GPU's memory moves there, and so would whatever MLX
    # puts into that memory next have to move back.
    return bool(mx.array_equal(mx.view(a, mx.uint16), mx.view(b, mx.uint16)))


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the right one.

    Attributes
    ----------
    error : float
        ``||y - ref|| / ||ref||``.
    problem : str or None
        What is wrong with it, if anything.
    """

    error: float
    problem: str | None


def judge(y: mx.array, ref: np.ndarray, terms: np.ndarray, tolerance: float) -> Verdict:
    """Compare a result with the right one.

    Parameters
    ----------
    y : array
    ref : ndarray
        float64, of the shape of y.
    terms : ndarray
        float64, the sums of the magnitudes of what was added up; they bound each number's
        error, as a sum may cancel.
    tolerance : float
        The format's, relative, before y was rounded to its dtype.
    """
    if y.shape != ref.shape:
        return Verdict(float("inf"), f"shape {y.shape}, not {ref.shape}")
    unit, tiny = DTYPES[str(y.dtype).rpartition(".")[2]]
    got = float64(y)
    norm = np.linalg.norm(ref)
    error = float(np.linalg.norm(got - ref) / norm) if norm else float(abs(got).max(initial=0))
    allowed = tolerance * terms + unit * (abs(ref) + tolerance * terms) + tiny
    right = abs(got - ref) <= allowed
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        wrong = int((~right).sum())
        return Verdict(
            error,
            f"{wrong} of {ref.size} wrong, the first at {at}: {got[at]:.7g}, not {ref[at]:.7g}",
        )
    # The sum of many rounding errors is far below the bound that each of them has.
    if ref.size >= 64 and not error <= tolerance + unit:
        return Verdict(error, f"relative error {error:.1e}, above {tolerance + unit:.1e}")
    return Verdict(error, None)
