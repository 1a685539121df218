"""dequantize against gguf-py, to the bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks, row_bytes, with_bad_block
from oracle import DTYPES, float64, rounded

typed = pytest.mark.parametrize("qtype", TYPES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@typed
@in_dtypes
@pytest.mark.parametrize("extreme", [False, True], ids=["random", "extreme"])
def test_values_are_the_formats_rounded_once(qtype, dtype, extreme):
    for K in (TYPES[qtype], 3 * TYPES[qtype], 1024):
        for N in (1, 2, 33, 96):
            rng = np.random.default_rng(K + N)
            raw = random_blocks(qtype, N, K, rng, extreme=extreme)
            y = gg.dequantize(mx.array(raw), qtype, dtype)
            assert y.dtype == dtype
            expected = rounded(dequantize64(raw, qtype), dtype)
            assert np.array_equal(float64(y), expected), f"N={N} K={K}"


@typed
def test_random_bytes_of_every_kind(qtype):
    # Scales of any bits, NaN and infinities among them.
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (512, row_bytes(qtype, 256)), np.uint8)
    y = np.array(gg.dequantize(mx.array(raw), qtype))
    expected = dequantize64(raw, qtype)
    assert np.isnan(expected).any() == (qtype != "mxfp4")
    assert np.array_equal(y, expected, equal_nan=True)


@typed
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@in_dtypes
def test_a_bad_block_spoils_itself_alone(qtype, value, dtype):
    size = TYPES[qtype]
    clean = random_blocks(qtype, 3, 3 * size, np.random.default_rng(0))
    bad = with_bad_block(clean, qtype, 1, 1, value)
    y = float64(gg.dequantize(mx.array(bad), qtype, dtype))
    spoilt = np.zeros(y.shape, bool)
    spoilt[1, size : 2 * size] = True
    # Zero quants times infinity are NaN, and an MXFP4 scale has no NaN.
    assert not np.isfinite(y[spoilt]).any()
    good = float64(gg.dequantize(mx.array(clean), qtype, dtype))
    assert np.array_equal(y[~spoilt], good[~spoilt])


@typed
def test_any_rank_and_strides(qtype):
    raw = random_blocks(qtype, 24, 512, np.random.default_rng(0))
    expected = dequantize64(raw, qtype).reshape(2, 3, 4, 512)
    w = mx.array(raw).reshape(2, 3, 4, -1)
    assert np.array_equal(gg.dequantize(w, qtype), expected)
    assert np.array_equal(gg.dequantize(w[1, 2, 3], qtype), expected[1, 2, 3])
    assert np.array_equal(gg.dequantize(w[:, ::2, ::-1], qtype), expected[:, ::2, ::-1])
    swapped = gg.dequantize(w.transpose(2, 0, 1, 3), qtype)
    assert np.array_equal(swapped, expected.transpose(2, 0, 1, 3))
    broadcast = gg.dequantize(mx.broadcast_to(w[:1], w.shape), qtype)
    assert np.array_equal(broadcast, np.broadcast_to(expected[:1], expected.shape))
    half = row_bytes(qtype, 256)
    assert np.array_equal(gg.dequantize(w[..., half:], qtype), expected[..., 256:])


@pytest.mark.parametrize("qtype", ["f32", "f16", "bf16"])
def test_plain_weights_may_come_in_their_own_dtype(qtype):
    raw = random_blocks(qtype, 3, 33, np.random.default_rng(0))
    w = mx.view(mx.array(raw), DTYPES[qtype])
    assert np.array_equal(gg.dequantize(w, qtype), dequantize64(raw, qtype))
    assert np.array_equal(gg.dequantize(w.T, qtype), dequantize64(raw, qtype).T)


@typed
@pytest.mark.parametrize("shape", [(0,), (0, 1), (3, 0), (2, 0, 1)])
def test_empty(qtype, shape):
    w = mx.zeros((*shape[:-1], shape[-1] * row_bytes(qtype, 256)), mx.uint8)
    y = gg.dequantize(w, qtype)
    mx.eval(y)
    assert y.shape == (*shape[:-1], shape[-1] * 256)


def test_defaults_and_names_in_any_case():
    w = mx.array(random_blocks("q4_k", 2, 256, np.random.default_rng(0)))
    assert gg.dequantize(w, "q4_k").dtype == mx.float32
    assert mx.array_equal(gg.dequantize(w, "Q4_K"), gg.dequantize(w, qtype="q4_k"))
