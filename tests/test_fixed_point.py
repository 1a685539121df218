"""The error of a product before it is rounded to the output's dtype.

x may be taken as fixed point (csrc/cpu/fixed.h): here are the inputs that are hard on it.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks, saturated_blocks
from oracle import DTYPES, TOLERANCE, float64, relative_error

QUANTISED = [name for name, size in TYPES.items() if size > 1]
BATCHES = (1, 3, 8, 9, 33)
typed = pytest.mark.parametrize("qtype", QUANTISED)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def unrounded(x: mx.array, w: mx.array, qtype: str) -> np.ndarray:
    """The product to nearly the precision of float32: y, and what it was rounded by."""
    y = gg.quantized_matmul(x, w, qtype)
    rest = gg.quantized_addmm(-y, x, w, qtype)  # rounded once, from float32
    return float64(y) + float64(rest)


def check_exact(X: np.ndarray, dtype: mx.Dtype, qtype: str, raw: np.ndarray, where: str) -> None:
    x = mx.array(X.astype(np.float32)).astype(dtype)
    expected = float64(x) @ dequantize64(raw, qtype).T
    for M in BATCHES:
        error = relative_error(unrounded(x[:M], mx.array(raw), qtype), expected[:M])
        assert error <= TOLERANCE[dtype], f"{where} M={M}: {error}"


@typed
@in_dtypes
def test_gaussian_activations(qtype, dtype):
    rng = np.random.default_rng(0)
    for K in (1024, 2 * TYPES[qtype], 1024 + 3 * TYPES[qtype]):
        raw = random_blocks(qtype, 256, K, rng, extreme=False)
        check_exact(rng.standard_normal((max(BATCHES), K)), dtype, qtype, raw, f"K={K}")


@typed
@in_dtypes
def test_outliers_do_not_drown_the_others(qtype, dtype):
    rng = np.random.default_rng(1)
    X = rng.standard_normal((max(BATCHES), 2048))
    for row in X:
        row[rng.choice(2048, 8, replace=False)] *= 60
    raw = random_blocks(qtype, 256, 2048, rng, extreme=False)
    check_exact(X, dtype, qtype, raw, "8 values 60 times larger")


@typed
@in_dtypes
def test_blocks_of_very_different_size(qtype, dtype):
    rng = np.random.default_rng(2)
    sizes = np.repeat(2.0 ** np.array([-10, 3, -4, 0]), 256)
    X = rng.standard_normal((max(BATCHES), 1024)) * sizes
    raw = random_blocks(qtype, 256, 1024, rng, extreme=False)
    check_exact(X, dtype, qtype, raw, "blocks of different size")


@typed
@pytest.mark.parametrize(
    ("dtype", "most"),
    # The first two become the largest words, of two bytes with signs and of 16 bits; the third
    # one of 24 bits.
    [
        (mx.float32, 32639 / 2**14),
        (mx.float32, 32767 / 2**14),
        (mx.float32, 2 - 2.0**-23),
        (mx.bfloat16, 2 - 2.0**-7),
    ],
)
def test_the_largest_sums_do_not_overflow(qtype, dtype, most):
    raw = saturated_blocks(qtype, 1024)
    W = dequantize64(raw, qtype)
    for x in (np.full(1024, most), np.full(1024, -most), *(np.sign(W + 1e-9) * most)):
        X = np.tile(x, (9, 1))
        expected, terms = X @ W.T, np.abs(X) @ np.abs(W).T
        for M in (1, 9):
            y = unrounded(mx.array(X[:M].astype(np.float32)).astype(dtype), mx.array(raw), qtype)
            # Finer than any lost carry, coarser than two roundings to bf16.
            assert (np.abs(y - expected[:M]) <= 8e-6 * terms[:M]).all(), f"M={M}"


# MXFP4's scales go as far as f32 does; its sums meet that of x first.
@pytest.mark.parametrize("qtype", [q for q in QUANTISED if q != "mxfp4"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_only_results_may_be_beyond_single_precision(qtype, dtype):
    """Sums of codes times large activations are, before the weights' scale brings them back."""
    rng = np.random.default_rng(5)
    raw = random_blocks(qtype, 33, 1024, rng, size=(1e-4, 1e-3))
    W = dequantize64(raw, qtype)
    x = mx.array((5e36 * rng.uniform(-1, 1, (12, 1024))).astype(np.float32)).astype(dtype)
    X = float64(x)
    expected, terms = X @ W.T, np.abs(X) @ np.abs(W).T
    assert terms.max() < 3e38
    for M in (1, 12):
        y = float64(gg.quantized_matmul(x[:M], mx.array(raw), qtype))
        assert (np.abs(y - expected[:M]) <= 5e-3 * terms[:M]).all(), f"M={M}"


@typed
@in_dtypes
def test_a_row_beside_larger_sums_keeps_its_result(qtype, dtype):
    """Flat rows have sums beyond 32 bits where others have not; they share a tile."""
    rng = np.random.default_rng(4)
    raw = mx.array(random_blocks(qtype, 12, 1024, rng, extreme=False))
    X = rng.standard_normal((32, 1024))
    flat = np.concatenate([X[:16], np.ones((16, 1024))])
    y, beside = (
        gg.quantized_matmul(mx.array(rows.astype(np.float32)).astype(dtype), raw, qtype)
        for rows in (X, np.concatenate([flat[::2], flat[1::2]]))
    )
    assert mx.array_equal(y[:16:2], beside[:8])
    assert mx.array_equal(y[1:16:2], beside[16:24])
