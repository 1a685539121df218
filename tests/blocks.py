"""Random packed blocks of every supported tensor type, and the oracle that decodes them.

Nothing here reads the project's own code: sizes and values come from gguf-py, so a mistake in our
format table or kernels cannot hide in the tests' inputs.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Byte offsets of the fp16 fields of a block: the scale `d`, then the min where there is one.
_HALVES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
# The bytes that hold a block's sub-scales (its quants where it has none), and the byte values that
# drive them to their ends: 63 and 0 for 6 bits unsigned, 127 and -128 for int8, ...
_SATURATE = {
    "q4_0": (2, 18, (0xFF, 0x00)),
    "q4_1": (4, 20, (0xFF, 0x00)),
    "q5_0": (2, 22, (0xFF, 0x00)),
    "q5_1": (4, 24, (0xFF, 0x00)),
    "q8_0": (2, 34, (0x7F, 0x80)),
    "q2_k": (0, 16, (0xFF, 0x00)),
    "q3_k": (96, 108, (0xFF, 0x00)),
    "q4_k": (4, 16, (0xFF, 0x00)),
    "q5_k": (4, 16, (0xFF, 0x00)),
    "q6_k": (192, 208, (0x7F, 0x80)),
    "iq4_nl": (2, 18, (0xFF, 0x00)),
    "iq4_xs": (2, 8, (0xFF, 0x00)),
}
_PLAIN: dict[str, np.dtype] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}
# Largest and smallest normal, largest and smallest subnormal, zero: both signs of each.
_EXTREME_HALVES = np.array(
    [0x7BFF, 0x0400, 0x03FF, 0x0001, 0x0000, 0xFBFF, 0x8400, 0x83FF, 0x8001, 0x8000], np.uint16
)


def _ggml(qtype: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[qtype.upper()]


def _sizes(qtype: str) -> tuple[int, int]:
    return GGML_QUANT_SIZES[_ggml(qtype)]


#: Weights per block of each supported type, by its lower-case GGUF name.
TYPES: dict[str, int] = {name: _sizes(name)[0] for name in (*_PLAIN, *_HALVES, "mxfp4")}


def row_bytes(qtype: str, K: int) -> int:
    """Bytes of a packed row of K weights."""
    size, nbytes = _sizes(qtype)
    if K % size:
        raise ValueError(f"[row_bytes] Expected K divisible by {size} for {qtype}. Received {K}.")
    return K // size * nbytes


def dequantize64(packed: np.ndarray, qtype: str) -> np.ndarray:
    """Decode packed rows with gguf-py.

    Parameters
    ----------
    packed : uint8 array ``[..., row_bytes]``
    qtype : a name of `TYPES`, any case

    Returns
    -------
    float64 array ``[..., K]``: gguf-py's float32 weights, widened. NaN and Inf pass through.
    """
    packed = np.ascontiguousarray(packed)
    size, nbytes = _sizes(qtype)
    shape = (*packed.shape[:-1], packed.shape[-1] // nbytes * size)
    if packed.size == 0:
        return np.zeros(shape)
    with np.errstate(all="ignore"):
        return dequantize(packed, _ggml(qtype)).astype(np.float64).reshape(shape)


def random_blocks(
    qtype: str,
    rows: int,
    K: int,
    rng: np.random.Generator,
    *,
    extreme: bool = False,
    size: tuple[float, float] = (0.02, 1.0),
) -> np.ndarray:
    """Draw packed rows with every bit of every field in use.

    Quants and sub-scales are random bytes; the fp16 scales (for MXFP4 the exponents) are drawn so
    that a block's weights have a root mean square between 0.02 and 1, with d and min of either
    sign. Weights are always finite.

    Parameters
    ----------
    qtype : a name of `TYPES`, any case
    rows, K : shape of the decoded matrix; K is a multiple of the type's block
    rng : source of randomness
    extreme : replace about a quarter of the blocks (at least one) by blocks at the ends of the
        type's range: scales that are the largest fp16, subnormal, zero or negative zero,
        saturated sub-scales and quants, MXFP4 exponents 0, 1, 2 and 254
    size : least and greatest root mean square of a block's weights, drawn log-uniformly

    Returns
    -------
    uint8 array ``[rows, row_bytes]``
    """
    qtype = qtype.lower()
    nbytes = _sizes(qtype)[1]
    blocks_per_row = row_bytes(qtype, K) // nbytes
    blocks = _fill(qtype, rows * blocks_per_row, rng, size)
    if extreme and len(blocks):
        chosen = rng.permutation(len(blocks))[: max(1, len(blocks) // 4)]
        _EXTREMES.get(qtype, _extreme_scaled)(qtype, blocks, chosen, blocks_per_row, rng)
    return blocks.reshape(rows, blocks_per_row * nbytes)


def saturated_blocks(qtype: str, K: int) -> np.ndarray:
    """Packed rows whose fp16 fields are 1 and whose quants and sub-scales are all at an end.

    One row of K weights for every pair of a byte in all quants and one in all sub-scales (for
    MXFP4, whose exponents stand for 1, of a byte alone).
    """
    qtype = qtype.lower()
    nbytes = _sizes(qtype)[1]
    first, last, ends = _SATURATE.get(qtype, (0, 1, (127,)))
    rows = []
    for quants in (0x00, 0x0F, 0xF0, 0xFF, 0x7F, 0x80):
        for scales in ends:
            block = np.full((1, nbytes), quants, np.uint8)
            block[:, first:last] = scales
            for offset in _HALVES.get(qtype, ()):
                _set_half(block, offset, np.ones(1, "<f2"))
            rows.append(np.tile(block, K // _sizes(qtype)[0]).ravel())
    return np.stack(rows)


def with_bad_block(
    packed: np.ndarray, qtype: str, row: int, block: int, value: float
) -> np.ndarray:
    """Copy 2-D `packed` with one block spoilt: d = `value`, which is NaN or an infinity.

    MXFP4 has no NaN: its exponent becomes 255, with which every weight of magnitude 1 or more
    overflows to Inf. For plain types the block is one weight.
    """
    qtype = qtype.lower()
    out = packed.copy()
    nbytes = _sizes(qtype)[1]
    view = out[row, block * nbytes : (block + 1) * nbytes]
    if qtype == "mxfp4":
        view[0] = 255
        view[1:] |= 0x22  # no weight of magnitude below 1 is left
    elif qtype in _PLAIN:
        view[:] = _plain_bytes(qtype, np.array([value], np.float32))
    else:
        offset = _HALVES[qtype][0]
        view[offset : offset + 2] = np.array([value], "<f2").view(np.uint8)
    return out


def _fill(qtype: str, count: int, rng: np.random.Generator, limits) -> np.ndarray:
    nbytes = _sizes(qtype)[1]
    low, high = np.log(limits)
    size = np.exp(rng.uniform(low, high, count))
    if qtype in _PLAIN:
        weights = (size * rng.standard_normal(count)).astype(np.float32)
        return _plain_bytes(qtype, weights).reshape(count, nbytes)
    blocks = rng.integers(0, 256, (count, nbytes), np.uint8)
    if qtype == "mxfp4":
        # Random e2m1 values have a root mean square of about 2.9.
        blocks[:, 0] = np.round(127 + np.log2(size / 2.9))
        return blocks
    for offset, unit in zip(_HALVES[qtype], _field_units(qtype), strict=True):
        sign = rng.choice([-1.0, 1.0], count)
        jitter = rng.uniform(0.5, 1.0, count)
        _set_half(blocks, offset, (sign * size * jitter / unit).astype("<f2"))
    return blocks


@cache
def _field_units(qtype: str) -> tuple[float, ...]:
    """Root mean square of random weights per unit of each fp16 field, the others being zero."""
    rng = np.random.default_rng(0)
    units = []
    for field in _HALVES[qtype]:
        blocks = rng.integers(0, 256, (64, _sizes(qtype)[1]), np.uint8)
        for offset in _HALVES[qtype]:
            _set_half(blocks, offset, np.full(64, float(offset == field), "<f2"))
        units.append(float(np.sqrt(np.mean(dequantize64(blocks, qtype) ** 2))))
    return tuple(units)


def _set_half(blocks: np.ndarray, offset: int, values: np.ndarray) -> None:
    blocks[:, offset : offset + 2] = values.view(np.uint8).reshape(-1, 2)


def _plain_bytes(qtype: str, weights: np.ndarray) -> np.ndarray:
    if qtype == "bf16":  # the upper half of the float32: rounding is of no interest here
        return (weights.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    return weights.astype(_PLAIN[qtype]).view(np.uint8)


def _extreme_scaled(qtype, blocks, chosen, blocks_per_row, rng):
    first, last, ends = _SATURATE[qtype]
    for i, index in enumerate(chosen):
        if i % 3 != 1:
            for offset in _HALVES[qtype]:
                half = rng.choice(_EXTREME_HALVES).astype("<u2")
                blocks[index, offset : offset + 2] = half.reshape(1).view(np.uint8)
        if i % 3 != 0:
            mixed = rng.choice(np.array(ends, np.uint8), last - first)
            blocks[index, first:last] = [ends[0], ends[1], mixed][rng.integers(3)]


def _extreme_mxfp4(qtype, blocks, chosen, blocks_per_row, rng):
    full = set()
    for i, index in enumerate(chosen):
        blocks[index, 0] = exponent = (0, 254, 1, 2)[i % 4]
        row = index // blocks_per_row
        if exponent == 254 and row in full:
            blocks[index, 0] = 0
        elif exponent == 254:
            # One weight of +-0.5, once a row: dot products stay finite in float32.
            full.add(row)
            blocks[index, 1:] = rng.choice(np.array([0x00, 0x08, 0x80, 0x88], np.uint8), 16)
            nibble = rng.choice(np.array([0x01, 0x09, 0x10, 0x90], np.uint8))
            blocks[index, 1 + rng.integers(16)] = nibble


def _extreme_plain(qtype, blocks, chosen, blocks_per_row, rng):
    dtype = _PLAIN[qtype]
    if qtype == "f16":
        patterns = _EXTREME_HALVES
    elif qtype == "bf16":
        # 2^100, smallest normal, subnormals, zero: products and sums stay finite in float32.
        patterns = np.array([0x7180, 0x0080, 0x007F, 0x0001, 0x0000, 0xF180, 0x8001, 0x8000])
    else:
        patterns = np.array([0x71800000, 0x00800000, 0x007FFFFF, 1, 0, 0xF1800000, 0x80000000])
    values = rng.choice(patterns, len(chosen)).astype(f"<u{dtype.itemsize}")
    blocks[chosen] = values.view(np.uint8).reshape(len(chosen), -1)


_EXTREMES = {"mxfp4": _extreme_mxfp4, **dict.fromkeys(_PLAIN, _extreme_plain)}
