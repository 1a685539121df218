"""quantized_matmul and quantized_addmm against dequantised weights in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks, row_bytes, with_bad_block
from oracle import DTYPES, ON_GPU, activations, bits, check, float64, interval, magnitudes

ROWS = (0, 1, 2, 3, 8, 9, 33)
OUTPUTS = (1, 2, 33, 96)
typed = pytest.mark.parametrize("qtype", TYPES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def inputs_of(qtype: str) -> tuple[int, ...]:
    return (TYPES[qtype], 3 * TYPES[qtype], 1024)


def packed(qtype: str, N: int, K: int, seed: int = 0, **options) -> np.ndarray:
    return random_blocks(qtype, N, K, np.random.default_rng(seed), **options)


@typed
@in_dtypes
@pytest.mark.parametrize("extreme", [False, True], ids=["random", "extreme"])
def test_every_shape_equals_float64(qtype, dtype, extreme):
    for K in inputs_of(qtype):
        raw = packed(qtype, max(OUTPUTS), K, K, extreme=extreme)
        W, w = dequantize64(raw, qtype), mx.array(raw)
        x, X = activations((max(ROWS), K), dtype, np.random.default_rng(K))
        z, Z = activations((max(ROWS), max(OUTPUTS)), dtype, np.random.default_rng(K + 1))
        expected = interval(X @ W.T, magnitudes(X, W.T, dtype), dtype)
        for N in OUTPUTS:
            Zn, Wn = Z[:, :N], W[:N]
            back = interval(Zn @ Wn, np.abs(Zn) @ np.abs(Wn), dtype)
            for M in ROWS:
                where = f"{qtype} {dtype} M={M} N={N} K={K}"
                y = gg.quantized_matmul(x[:M], w[:N], qtype)
                assert y.dtype == dtype
                check(y, expected[:, :M, :N], where, relative=not extreme)
                y = gg.quantized_matmul(z[:M, :N], w[:N], qtype, transpose=False)
                assert y.dtype == dtype
                check(y, back[:, :M], where + " transpose=False", relative=not extreme)


@typed
@in_dtypes
def test_addmm_of_every_shape_equals_float64(qtype, dtype):
    rng = np.random.default_rng(7)
    for K in inputs_of(qtype):
        raw = packed(qtype, max(OUTPUTS), K, K)
        W, w = dequantize64(raw, qtype), mx.array(raw)
        x, X = activations((max(ROWS), K), dtype, rng)
        c, C = activations((max(ROWS), max(OUTPUTS)), dtype, rng)
        ref, terms = X @ W.T, magnitudes(X, W.T, dtype)
        for alpha, beta in ((0.5, -2.25), (-1.5, 0.0)):
            sums = abs(alpha) * terms + abs(beta * C)
            expected = interval(alpha * ref + beta * C, sums, dtype)
            for N in OUTPUTS:
                for M in ROWS:
                    where = f"{qtype} {dtype} M={M} N={N} K={K} alpha={alpha} beta={beta}"
                    y = gg.quantized_addmm(c[:M, :N], x[:M], w[:N], qtype, alpha, beta)
                    assert y.dtype == dtype
                    check(y, expected[:, :M, :N], where)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("qtype", ["q8_0", "q4_k", "f32"])
def test_addmm_broadcasts_c(qtype, transpose):
    rng = np.random.default_rng(3)
    raw = packed(qtype, 33, 256)
    W = dequantize64(raw, qtype)
    W = W.T if transpose else W
    x, X = activations((2, 3, W.shape[0]), mx.float32, rng)
    n = W.shape[1]
    shapes = [(), (1,), (n,), (3, 1), (3, n), (1, n), (2, 1, 1), (2, 1, n), (2, 3, n), (1, 1, 1)]
    for shape in shapes:
        c, C = activations(shape, mx.float32, rng)
        y = gg.quantized_addmm(c, x, mx.array(raw), qtype, 2.0, 3.0, transpose)
        terms = 2 * np.abs(X) @ np.abs(W) + 3 * np.abs(C)
        check(y, interval(2 * X @ W + 3 * C, terms, mx.float32), f"c of shape {shape}")


def test_addmm_takes_c_of_another_dtype_as_x():
    x, _ = activations((3, 256), mx.bfloat16, np.random.default_rng(0))
    w = mx.array(packed("q4_k", 5, 256))
    c = mx.array(np.random.default_rng(1).standard_normal(5).astype(np.float32))
    y = gg.quantized_addmm(c, x, w, "q4_k")
    assert y.dtype == mx.bfloat16
    assert mx.array_equal(y, gg.quantized_addmm(c.astype(mx.bfloat16), x, w, "q4_k"))


@typed
@in_dtypes
@pytest.mark.parametrize("transpose", [True, False])
def test_rows_of_a_batch_equal_their_solo_runs(qtype, dtype, transpose):
    for K in inputs_of(qtype):
        w = mx.array(packed(qtype, 33, K))
        inner = K if transpose else 33
        x, _ = activations((70, inner), dtype, np.random.default_rng(K))
        solo = [gg.quantized_matmul(row, w, qtype, transpose) for row in x]
        solo = bits(mx.stack(solo))
        # Up to 8 rows equal their solo runs; more may go another way, one for any number.
        many = bits(gg.quantized_matmul(x, w, qtype, transpose))
        for M in (*ROWS, 64, 65):
            if ON_GPU and not (M <= 8 and transpose):
                continue  # promised for a gemv: tiles of many rows sum in another order
            batch = gg.quantized_matmul(x[:M], w, qtype, transpose)
            assert np.array_equal(bits(batch), (solo if M <= 8 else many)[:M]), f"K={K} M={M}"
        for shape in ((2, 1, inner), (2, 3, inner), (1, 3, 2, inner)):
            M = int(np.prod(shape[:-1]))
            batch = gg.quantized_matmul(x[:M].reshape(shape), w, qtype, transpose)
            assert np.array_equal(bits(batch).reshape(M, -1), solo[:M]), f"K={K} x {shape}"


@typed
def test_an_output_depends_on_its_own_weight_row_alone(qtype):
    x, _ = activations((3, 1024), mx.float32, np.random.default_rng(0))
    w = mx.array(packed(qtype, 97, 1024))
    whole = bits(gg.quantized_matmul(x, w, qtype)).reshape(3, 97, 4)
    for first, last in ((0, 1), (5, 6), (1, 34), (95, 97)):
        part = bits(gg.quantized_matmul(x, w[first:last], qtype)).reshape(3, -1, 4)
        assert np.array_equal(part, whole[:, first:last]), f"rows {first}:{last}"


@typed
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_block_spoils_its_own_row_or_columns(qtype, value):
    K = 3 * TYPES[qtype]
    clean = packed(qtype, 34, K)
    w, bad = mx.array(clean), mx.array(with_bad_block(clean, qtype, 2, 1, value))
    for M in (1, 2, 9):
        x, _ = activations((M, K), mx.float32, np.random.default_rng(M))
        good, y = (float64(gg.quantized_matmul(x, a, qtype)) for a in (w, bad))
        assert not np.isfinite(y[:, 2]).any()
        others = np.arange(34) != 2
        assert np.array_equal(y[:, others], good[:, others])

        z, _ = activations((M, 34), mx.float32, np.random.default_rng(M))
        good, y = (float64(gg.quantized_matmul(z, a, qtype, False)) for a in (w, bad))
        spoilt = np.arange(K) // TYPES[qtype] == 1
        assert not np.isfinite(y[:, spoilt]).all(axis=0).any()
        assert np.array_equal(y[:, ~spoilt], good[:, ~spoilt])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_activation_spoils_its_own_row(value):
    w = mx.array(packed("q5_k", 33, 256))
    X = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    good = float64(gg.quantized_matmul(mx.array(X), w, "q5_k"))
    X[3, 17] = value
    y = float64(gg.quantized_matmul(mx.array(X), w, "q5_k"))
    assert not np.isfinite(y[3]).any()
    assert np.array_equal(np.delete(y, 3, 0), np.delete(good, 3, 0))


@typed
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_activations_beyond_half_precision(qtype, dtype):
    rng = np.random.default_rng(0)
    for scale in (3000.0, 1e6, 1e30):
        raw = packed(qtype, 33, 1024)
        W = dequantize64(raw, qtype)
        x = mx.array((scale * rng.uniform(-1, 1, (3, 1024))).astype(np.float32))
        x = x.astype(DTYPES[dtype])
        X = float64(x)
        y = gg.quantized_matmul(x, mx.array(raw), qtype)
        assert mx.isfinite(y).all()
        check(y, interval(X @ W.T, np.abs(X) @ np.abs(W).T, y.dtype), f"x up to {scale}")


def test_constant_activations_do_not_overflow_half_precision():
    raw = packed("q4_0", 4, 32)
    x = mx.full((1, 32), 3000.0, mx.float16)
    X, W = float64(x), dequantize64(raw, "q4_0")
    y = gg.quantized_matmul(x, mx.array(raw), "q4_0")
    check(y, interval(X @ W.T, np.abs(X) @ np.abs(W).T, y.dtype), "a block of 3000s")


def test_half_results_overflow_to_infinity_only_by_their_own_size():
    # The sum passes 65504 on its way and comes back.
    w = mx.ones((1, 64), mx.float16)
    x = mx.array([[6e4] * 32 + [-6e4] * 31 + [-5e4]], mx.float16)
    assert gg.quantized_matmul(x, w, "f16").item() == float64(x).sum()
    assert gg.quantized_matmul(mx.abs(x), w, "f16").item() == np.inf


@pytest.mark.parametrize("qtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("transpose", [True, False])
def test_plain_weights_in_their_own_dtype_equal_their_bytes(qtype, transpose):
    raw = packed(qtype, 7, 33)
    w = mx.view(mx.array(raw), DTYPES[qtype])
    assert w.shape == (7, 33)
    x, _ = activations((3, 33 if transpose else 7), mx.float32, np.random.default_rng(0))
    y = gg.quantized_matmul(x, w, qtype, transpose)
    assert mx.array_equal(y, gg.quantized_matmul(x, mx.array(raw), qtype, transpose))
    # Strided, and cut from the middle of a row.
    y = gg.quantized_matmul(x, w[::-1], qtype, transpose)
    assert mx.array_equal(y, gg.quantized_matmul(x, mx.array(raw[::-1].copy()), qtype, transpose))
    assert gg.quantized_matmul(x[:, 2:5], w[2:5, 2:5], qtype, transpose).shape == (3, 3)


@pytest.mark.parametrize("K", [576, 960])
def test_q8_0_takes_any_multiple_of_32(K):
    raw = packed("q8_0", 33, K)
    x, X = activations((2, K), mx.float32, np.random.default_rng(0))
    W = dequantize64(raw, "q8_0")
    y = gg.quantized_matmul(x, mx.array(raw), "q8_0")
    check(y, interval(X @ W.T, np.abs(X) @ np.abs(W).T, y.dtype), f"K={K}")


def test_many_rows_of_x():
    raw = packed("q4_0", 3, 32)
    x, X = activations((20_001, 32), mx.float32, np.random.default_rng(0))
    W = dequantize64(raw, "q4_0")
    y = gg.quantized_matmul(x, mx.array(raw), "q4_0")
    check(y, interval(X @ W.T, np.abs(X) @ np.abs(W).T, y.dtype), "M=20001")


@pytest.mark.parametrize("qtype", ["q4_k", "q8_0", "f32", "f16"])
def test_empty_problems(qtype):
    K = 256
    for M, N, inputs in ((0, 4, K), (2, 0, K), (2, 4, 0), (0, 0, 0)):
        w = mx.array(np.zeros((N, row_bytes(qtype, inputs)), np.uint8))
        for batch in ((), (3,), (0,), (2, 0)):
            where = f"batch={batch} M={M} N={N} K={inputs}"
            y = gg.quantized_matmul(mx.ones((*batch, M, inputs)), w, qtype)
            assert np.array_equal(y, np.zeros((*batch, M, N))), where
            y = gg.quantized_matmul(mx.ones((*batch, M, N)), w, qtype, transpose=False)
            assert np.array_equal(y, np.zeros((*batch, M, inputs))), where
            c = mx.ones((*batch, M, N))
            y = gg.quantized_addmm(c, mx.ones((*batch, M, inputs)), w, qtype, beta=3.0)
            assert np.array_equal(y, np.full((*batch, M, N), 3.0)), where
    many = mx.array(np.zeros((0, 4, row_bytes(qtype, K)), np.uint8))
    assert np.array(gg.quantized_matmul(mx.ones((0, 2, K)), many, qtype)).shape == (0, 2, 4)
    assert np.array(gg.quantized_matmul(mx.ones((1, 2, K)), many, qtype)).shape == (0, 2, 4)
