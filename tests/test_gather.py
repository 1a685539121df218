"""gather_qmm against dequantised experts in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks, row_bytes, with_bad_block
from oracle import DTYPES, ON_GPU, activations, bits, check, float64, interval, magnitudes

ROWS = (0, 1, 2, 3, 8, 9, 33)
OUTPUTS = (1, 2, 33, 96)
EXPERTS = 3
LHS = [2, 0, 1, 1, 0]
RHS = [2, 0, 2, 1, 0]
typed = pytest.mark.parametrize("qtype", TYPES)


def experts(qtype: str, N: int, K: int, seed: int = 0, **options) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return random_blocks(qtype, EXPERTS * N, K, rng, **options).reshape(EXPERTS, N, -1)


def pairs(X: np.ndarray, W: np.ndarray, lhs, rhs, dtype: mx.Dtype) -> np.ndarray:
    """The interval of x[lhs] @ W[rhs]; X [T, M, K], W [E, K, N]."""
    x, w = X[np.array(lhs)], W[np.array(rhs)]
    return interval(x @ w, magnitudes(x, w, dtype), dtype)


@typed
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_shape_equals_float64(qtype, dtype):
    order = np.argsort(RHS, kind="stable")
    unsorted = (mx.array(LHS), mx.array(RHS))
    ordered = (mx.array(np.array(LHS)[order]), mx.array(np.array(RHS)[order]))
    for K in (TYPES[qtype], 3 * TYPES[qtype], 1024):
        extreme = K // TYPES[qtype] == 3
        raw = experts(qtype, max(OUTPUTS), K, K, extreme=extreme)
        W, w = dequantize64(raw, qtype), mx.array(raw)
        x, X = activations((3, max(ROWS), K), dtype, np.random.default_rng(K))
        expected = pairs(X, W.swapaxes(1, 2), LHS, RHS, dtype)
        z, Z = activations((3, max(ROWS), 2), dtype, np.random.default_rng(K))
        back = pairs(Z, W[:, :2], LHS, RHS, dtype)
        for M in ROWS:
            for N in OUTPUTS:
                where = f"{qtype} {dtype} M={M} N={N} K={K}"
                y = gg.gather_qmm(x[:, :M], w[:, :N], qtype, *unsorted)
                assert y.dtype == dtype
                check(y, expected[:, :, :M, :N], where, relative=not extreme)
                s = gg.gather_qmm(x[:, :M], w[:, :N], qtype, *ordered, sorted_indices=True)
                assert np.array_equal(bits(s), bits(y[mx.array(order)])), where + " sorted"
            y = gg.gather_qmm(z[:, :M], w[:, :2], qtype, *unsorted, transpose=False)
            where = f"{qtype} {dtype} M={M} N=2 K={K} transpose=False"
            check(y, back[:, :, :M], where, relative=not extreme)


@typed
def test_a_pair_equals_its_matrix_product(qtype):
    w = mx.array(experts(qtype, 33, 512))
    for M in (1, 2, 9):
        x, _ = activations((3, M, 512), mx.bfloat16, np.random.default_rng(M))
        y = gg.gather_qmm(x, w, qtype, mx.array(LHS), mx.array(RHS))
        for i, (a, b) in enumerate(zip(LHS, RHS, strict=True)):
            assert np.array_equal(bits(y[i]), bits(gg.quantized_matmul(x[a], w[b], qtype)))


@pytest.mark.parametrize("kind", [mx.int64, mx.int32, mx.uint8, mx.uint16, mx.uint32])
def test_indices_of_any_integer_type(kind):
    w = mx.array(experts("q8_0", 5, 64))
    x, X = activations((3, 2, 64), mx.float32, np.random.default_rng(0))
    y = gg.gather_qmm(x, w, "q8_0", mx.array(LHS, kind), mx.array(RHS, kind))
    W = dequantize64(np.array(w), "q8_0").swapaxes(1, 2)
    check(y, pairs(X, W, LHS, RHS, mx.float32), str(kind))


def test_indices_broadcast_and_default_to_all():
    w = mx.array(experts("q4_k", 5, 256))
    W = dequantize64(np.array(w), "q4_k").swapaxes(1, 2)
    x, X = activations((2, 3, 4, 256), mx.float32, np.random.default_rng(0))
    flat = X.reshape(6, 4, 256)

    def same(y, lhs, rhs):
        lhs, rhs = np.broadcast_arrays(lhs, rhs)
        check(y, pairs(flat, W, lhs, rhs, mx.float32), f"lhs {lhs.shape} rhs {rhs.shape}")

    every = np.arange(6).reshape(2, 3)
    rhs = np.array([[[0]], [[2]]])
    lhs = np.array([[5, 0, 1, 1]])
    same(gg.gather_qmm(x, w, "q4_k"), every, np.arange(3))
    same(gg.gather_qmm(x, w, "q4_k", rhs_indices=mx.array(rhs)), every, rhs)
    same(gg.gather_qmm(x, w, "q4_k", mx.array(lhs.T)), lhs.T, np.arange(3))
    same(gg.gather_qmm(x, w, "q4_k", mx.array(lhs), mx.array(rhs)), lhs, rhs)
    same(gg.gather_qmm(x, w, "q4_k", mx.array(4), mx.array(1)), 4, 1)
    same(gg.gather_qmm(x, w, "q4_k", mx.array(lhs)[:, ::-1], mx.array(2)), lhs[:, ::-1], 2)
    one = gg.gather_qmm(x[0, 0], w, "q4_k", rhs_indices=mx.array([2, 1]))
    same(one, 0, [2, 1])


@pytest.mark.skipif(ON_GPU, reason="a GPU reads indices; the host does not see them")
@pytest.mark.parametrize(
    ("options", "name", "limit"),
    [
        ({"rhs_indices": [0, 3]}, "rhs_indices", 3),
        ({"rhs_indices": [-1, 0]}, "rhs_indices", 3),
        ({"lhs_indices": [0, 2, 1]}, "lhs_indices", 2),
        ({"lhs_indices": [-1, 0, 0]}, "lhs_indices", 2),
    ],
)
@pytest.mark.parametrize("M", [1, 3])
def test_an_index_out_of_range_is_an_error_and_no_more(options, name, limit, M):
    w = mx.array(experts("q4_k", 4, 256))
    x = mx.ones((2, M, 256))
    options = {k: mx.array(v) for k, v in options.items()}
    if "lhs_indices" in options:
        options["rhs_indices"] = mx.array([0, 1, 2])
    y = gg.gather_qmm(x, w, "q4_k", **options)
    expected = rf"\[gather_qmm\] Expected {name} below {limit}\. Received \d+\."
    with pytest.raises(RuntimeError, match=expected):
        mx.eval(y)
    good = gg.gather_qmm(x, w, "q4_k", rhs_indices=mx.array([0, 2]))
    assert mx.isfinite(good).all()


@typed
def test_a_bad_block_spoils_its_own_row_of_its_own_expert(qtype):
    K = 3 * TYPES[qtype]
    clean = experts(qtype, 5, K)
    bad = with_bad_block(clean.reshape(15, -1), qtype, 7, 1, np.nan).reshape(clean.shape)
    x, _ = activations((3, 2, K), mx.float32, np.random.default_rng(0))
    indices = mx.array(LHS), mx.array(RHS)
    good, y = (float64(gg.gather_qmm(x, mx.array(w), qtype, *indices)) for w in (clean, bad))
    spoilt = np.zeros(y.shape, bool)
    spoilt[np.array(RHS) == 1, :, 2] = True
    assert not np.isfinite(y[spoilt]).any()
    assert np.array_equal(y[~spoilt], good[~spoilt])


def test_strides_of_x_w_and_indices():
    w = mx.array(experts("q5_0", 66, 64))
    x, _ = activations((6, 4, 128), mx.float16, np.random.default_rng(0))
    lhs, rhs = mx.array([LHS, LHS[::-1]]), mx.array([RHS, RHS[::-1]])
    views = [
        (x[::2, :, ::2], w[:, ::2], lhs.T, rhs.T),
        (x[:, ::-1, 64:], w[::-1], lhs[:, ::-2], rhs[:, ::-2]),
        (x.transpose(1, 0, 2)[:, :, :64], w[1:, 1:34], lhs[:1], mx.minimum(rhs[1:], 1)),
        (mx.broadcast_to(x[:1, :1, :64], (3, 2, 64)), w, lhs, rhs),
    ]
    for i, view in enumerate(views):
        copies = [mx.array(np.array(a)) for a in view]
        y = gg.gather_qmm(view[0], view[1], "q5_0", *view[2:])
        z = gg.gather_qmm(copies[0], copies[1], "q5_0", *copies[2:])
        assert np.array_equal(bits(y), bits(z)), f"view {i}"


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("sizes", [(0, 3, 4, 256), (2, 0, 4, 256), (2, 3, 0, 256), (2, 3, 4, 0)])
def test_empty_problems(sizes, transpose):
    T, M, N, K = sizes
    w = mx.zeros((2, N, row_bytes("q4_k", K)), mx.uint8)
    x = mx.ones((T, M, K if transpose else N))
    for indices in ([], [0, 1, 0]):
        if indices and not T:
            continue
        rhs = mx.array(indices, mx.uint32)
        y = gg.gather_qmm(x, w, "q4_k", mx.zeros_like(rhs), rhs, transpose)
        expected = np.zeros((len(indices), M, N if transpose else K))
        assert np.array_equal(y, expected), indices


def test_no_experts():
    w = mx.zeros((0, 4, 144), mx.uint8)
    y = gg.gather_qmm(mx.ones((1, 2, 256)), w, "q4_k")
    mx.eval(y)
    assert y.shape == (0, 2, 4)
    y = gg.gather_qmm(mx.ones((2, 2, 256)), w, "q4_k", rhs_indices=mx.array([0, 0]))
    with pytest.raises(RuntimeError, match="Expected rhs_indices below 0"):
        mx.eval(y)


@pytest.mark.parametrize("qtype", ["f32", "f16", "bf16"])
def test_plain_experts_in_their_own_dtype(qtype):
    raw = experts(qtype, 7, 33)
    w = mx.view(mx.array(raw), DTYPES[qtype])
    x, X = activations((3, 2, 33), mx.float32, np.random.default_rng(0))
    y = gg.gather_qmm(x, w, qtype, mx.array(LHS), mx.array(RHS))
    W = dequantize64(raw, qtype).swapaxes(1, 2)
    check(y, pairs(X, W, LHS, RHS, mx.float32), qtype)
