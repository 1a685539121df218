"""Numbers at the ends of their formats, and bad ones: no row may spoil another."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks, with_bad_block
from oracle import DTYPES, bits, check, float64, interval

typed = pytest.mark.parametrize("qtype", TYPES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
K, N = 512, 67
PATHS = (1, 3, 8, 9, 40)  # rows of x: gemv, few, the most of few, many


def packed(qtype, rows=N, columns=K):
    return random_blocks(qtype, rows, columns, np.random.default_rng(1))


@typed
@in_dtypes
# 1e5 is infinite in float16, whose largest number takes its place; the least ones are subnormal.
@pytest.mark.parametrize("size", [1e5, 6e4, 1e-5, 1e-7, 1e-38, 1e-40])
def test_activations_of_any_size(qtype, dtype, size):
    raw = packed(qtype)
    W = dequantize64(raw, qtype)
    for M in PATHS:
        X = np.random.default_rng(M).uniform(-1, 1, (M, K)) * size
        if dtype == mx.float16:
            X = X.clip(-65504, 65504)
        x = mx.array(X.astype(np.float32)).astype(dtype)
        X = float64(x)
        y = gg.quantized_matmul(x, mx.array(raw), qtype)
        expected = interval(X @ W.T, np.abs(X) @ np.abs(W).T, dtype)
        check(y, expected, f"M={M}", relative=size >= 1e-5)


@typed
@in_dtypes
def test_large_and_small_activations_side_by_side(qtype, dtype):
    """Columns of 1e4, and of 1e-4: with one scale for a row, the small ones must still count."""
    raw = packed(qtype)
    W = dequantize64(raw, qtype)
    for M in PATHS:
        X = np.random.default_rng(M).uniform(0.5, 1, (M, K)) * np.where(np.arange(K) % 2, 1e4, 1e-4)
        x = mx.array(X.astype(np.float32)).astype(dtype)
        X = float64(x)
        y = gg.quantized_matmul(x, mx.array(raw), qtype)
        check(y, interval(X @ W.T, np.abs(X) @ np.abs(W).T, dtype), f"M={M}")


@typed
@in_dtypes
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_number_stays_in_its_row_of_x(qtype, dtype, transpose, value):
    w = mx.array(packed(qtype))
    columns = K if transpose else N
    for M in PATHS[1:]:
        X = np.random.default_rng(M).uniform(-1, 1, (M, columns)).astype(np.float32)
        good = gg.quantized_matmul(mx.array(X).astype(dtype), w, qtype, transpose)
        X[1, columns // 2] = value
        y = gg.quantized_matmul(mx.array(X).astype(dtype), w, qtype, transpose)
        assert not np.isfinite(float64(y[1])).any(), M
        rest = mx.array([i for i in range(M) if i != 1])
        assert np.array_equal(bits(y[rest]), bits(good[rest])), M


@typed
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_numbers_of_c_x_and_w_in_addmm_and_gather(qtype, value):
    rng = np.random.default_rng(0)
    clean = packed(qtype)
    w, spoilt = mx.array(clean), mx.array(with_bad_block(clean, qtype, 5, 0, value))
    X, C = (rng.uniform(-1, 1, (4, n)).astype(np.float32) for n in (K, N))
    good = float64(gg.quantized_addmm(mx.array(C), mx.array(X), w, qtype, 0.5, 2.0))
    C[2, 7] = value
    y = float64(gg.quantized_addmm(mx.array(C), mx.array(X), w, qtype, 0.5, 2.0))
    assert np.argwhere(~np.isfinite(y)).tolist() == [[2, 7]]
    assert np.array_equal(np.delete(y, 2, 0), np.delete(good, 2, 0))

    experts = mx.stack([w, spoilt, w])
    chosen = mx.array([0, 1, 2, 1])
    X[3, 0] = value
    y = float64(gg.gather_qmm(mx.array(X)[:, None], experts, qtype, rhs_indices=chosen).squeeze(1))
    good = float64(gg.quantized_matmul(mx.array(X), w, qtype))
    assert np.array_equal(y[[0, 2]], good[[0, 2]])
    assert np.argwhere(~np.isfinite(y[1])).ravel().tolist() == [5]
    assert np.array_equal(np.delete(y[1], 5), np.delete(good[1], 5))
    assert not np.isfinite(y[3]).any()


@typed
@in_dtypes
def test_zeros_of_either_sign(qtype, dtype):
    w = mx.array(packed(qtype))
    for M in PATHS:
        X = np.random.default_rng(M).uniform(-1, 1, (M, K)).astype(np.float32)
        X[:, ::3] = 0
        y = gg.quantized_matmul(mx.array(X).astype(dtype), w, qtype)
        X[:, ::3] = -0.0
        assert mx.array_equal(gg.quantized_matmul(mx.array(X).astype(dtype), w, qtype), y)
        nothing = gg.quantized_matmul(mx.full((M, K), -0.0, dtype), w, qtype)
        assert not np.array(nothing.astype(mx.float32)).any()


@pytest.mark.parametrize("qtype", ["f32", "f16", "bf16"])
def test_plain_numbers_keep_their_bits(qtype):
    """Signs of zero, subnormals, and infinities among them."""
    special = [0.0, -0.0, 1e-40, -1e-40, 6e-8, np.inf, -np.inf, 65504.0, 1.0, np.nan]
    w = mx.array(special, mx.float32).astype(DTYPES[qtype])[None]
    y = gg.dequantize(w, qtype, DTYPES[qtype])
    assert np.array_equal(bits(y[:, :-1]), bits(w[:, :-1]))
    assert mx.isnan(y[:, -1:]).all()  # of any payload
