"""grad, vjp, jvp, vmap, compile and checkpoint of the operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks
from oracle import DTYPES, activations, check, float64, interval


def packed(rng, *shape, qtype="q4_k"):
    *outer, K = shape
    return mx.array(random_blocks(qtype, int(np.prod(outer)), K, rng).reshape(*outer, -1))


def weights(w, transpose=True, qtype="q4_k"):
    W = dequantize64(np.array(w), qtype)
    return W.swapaxes(-1, -2) if transpose else W


def close(a: mx.array, b, tolerance: float = 2e-6) -> bool:
    a, b = float64(a), float64(b) if isinstance(b, mx.array) else np.asarray(b, np.float64)
    return a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


# Derivatives


@pytest.mark.parametrize("qtype", TYPES)
@pytest.mark.parametrize("transpose", [True, False])
def test_vjp_and_jvp_in_x_of_every_type(qtype, transpose, rng):
    w = packed(rng, 33, 256, qtype=qtype)
    W = weights(w, transpose, qtype)
    x, X = activations((3, W.shape[0]), mx.float32, rng)
    t, T = activations((3, W.shape[0]), mx.float32, rng)
    g, G = activations((3, W.shape[1]), mx.float32, rng)

    def fun(x):
        return gg.quantized_matmul(x, w, qtype, transpose)

    (y,), (dx,) = mx.vjp(fun, [x], [g])
    assert close(y, X @ W)
    check(dx, interval(G @ W.T, np.abs(G) @ np.abs(W).T, mx.float32), "vjp")
    _, (dy,) = mx.jvp(fun, [x], [t])
    check(dy, interval(T @ W, np.abs(T) @ np.abs(W), mx.float32), "jvp")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_derivatives_keep_the_dtype(dtype, rng):
    w = packed(rng, 33, 256)
    W = weights(w)
    x, _ = activations((3, 256), dtype, rng)
    g, G = activations((3, 33), dtype, rng)
    _, (dx,) = mx.vjp(lambda x: gg.quantized_matmul(x, w, "q4_k"), [x], [g])
    assert dx.dtype == dtype
    check(dx, interval(G @ W.T, np.abs(G) @ np.abs(W).T, dtype), "vjp")


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("c_shape", [(), (1,), (-1,), (3, 1), (3, -1), (2, 1, 1), (2, 3, -1)])
def test_addmm_derivatives_in_x_and_c(transpose, c_shape, rng):
    w = packed(rng, 5, 256)
    W = weights(w, transpose)
    n = W.shape[1]
    c_shape = tuple(n if i == -1 else i for i in c_shape)
    x, _ = activations((2, 3, W.shape[0]), mx.float32, rng)
    c, _ = activations(c_shape, mx.float32, rng)
    tx, TX = activations(x.shape, mx.float32, rng)
    tc, TC = activations(c_shape, mx.float32, rng)
    g, G = activations((2, 3, n), mx.float32, rng)

    def fun(x, c):
        return gg.quantized_addmm(c, x, w, "q4_k", 0.5, -3.0, transpose)

    _, (dx, dc) = mx.vjp(fun, [x, c], [g])
    assert close(dx, 0.5 * G @ W.T)
    _, vjp_c = mx.vjp(lambda c: mx.broadcast_to(-3.0 * c, (2, 3, n)), [c], [g])
    assert close(dc, float64(vjp_c[0]), 1e-5)
    _, (dy,) = mx.jvp(fun, [x, c], [tx, tc])
    assert close(dy, 0.5 * TX @ W - 3.0 * TC)
    _, (only_c,) = mx.jvp(lambda c: fun(x, c), [c], [tc])
    assert close(only_c, np.broadcast_to(-3.0 * TC, G.shape))
    # An argument of another dtype gets its derivative in that dtype.
    half = c.astype(mx.float16)
    assert mx.grad(lambda c: fun(x, c).sum())(half).dtype == mx.float16


def test_grad_of_a_vector_and_second_derivatives(rng):
    w = packed(rng, 5, 256)
    W = weights(w)
    x, X = activations((256,), mx.float32, rng)
    loss = lambda x: (gg.quantized_matmul(x, w, "q4_k") ** 2).sum()  # noqa: E731
    assert close(mx.grad(loss)(x), 2 * (X @ W) @ W.T)
    v, V = activations((256,), mx.float32, rng)
    hvp = mx.grad(lambda x: (mx.grad(loss)(x) * v).sum())(x)
    assert close(hvp, 2 * (V @ W) @ W.T)


def test_grad_sums_over_broadcast_batches(rng):
    w = packed(rng, 4, 1, 5, 256)
    W = weights(w)
    x, X = activations((3, 2, 256), mx.float32, rng)
    g, G = activations((4, 3, 2, 5), mx.float32, rng)
    (y,), (dx,) = mx.vjp(lambda x: gg.quantized_matmul(x, w, "q4_k"), [x], [g])
    assert close(y, X @ W)
    assert close(dx, (G @ W.swapaxes(-1, -2)).sum(0))


@pytest.mark.parametrize("transpose", [True, False])
def test_gather_derivatives(transpose, rng):
    w = packed(rng, 3, 5, 256)
    W = weights(w, transpose)
    x, X = activations((2, 2, 3, W.shape[1]), mx.float32, rng)
    lhs, rhs = np.array([[3, 0, 0], [1, 3, 3]]), np.array([[2, 0, 2], [1, 1, 0]])
    g, G = activations((2, 3, 3, W.shape[2]), mx.float32, rng)
    t, T = activations(x.shape, mx.float32, rng)

    def fun(x):
        return gg.gather_qmm(x, w, "q4_k", mx.array(lhs), mx.array(rhs), transpose)

    _, (dx,) = mx.vjp(fun, [x], [g])
    expected = np.zeros((4, 3, W.shape[1]))
    np.add.at(expected, lhs, G @ W[rhs].swapaxes(-1, -2))
    assert close(dx, expected.reshape(X.shape))
    _, (dy,) = mx.jvp(fun, [x], [t])
    assert close(dy, T.reshape(4, 3, -1)[lhs] @ W[rhs])
    nothing = mx.array(np.zeros((0,), np.uint32))
    none = mx.grad(lambda x: gg.gather_qmm(x, w, "q4_k", nothing, nothing, transpose).sum())(x)
    assert np.array_equal(none, np.zeros(x.shape))


def test_empty_batches_have_empty_derivatives(rng):
    w = packed(rng, 5, 256)
    x = mx.zeros((2, 0, 256))
    dx = mx.grad(lambda x: gg.quantized_matmul(x, w, "q4_k").sum())(x)
    assert np.array(dx).shape == x.shape
    dc = mx.grad(lambda c: gg.quantized_addmm(c, x, w, "q4_k").sum())(mx.ones((5,)))
    assert np.array_equal(dc, np.zeros(5))


def test_a_derivative_in_w_is_an_error(rng):
    # In their own dtype: MLX itself refuses to differentiate by integers.
    w = mx.ones((3, 8))
    x = mx.ones((2, 8))
    functions = {
        "quantized_matmul": lambda w: gg.quantized_matmul(x, w, "f32").sum(),
        "gather_qmm": lambda w: gg.gather_qmm(x, w[None], "f32").sum(),
        "dequantize": lambda w: gg.dequantize(w, "f32").sum(),
    }
    packed_w = packed(rng, 3, 256)
    bytes_of = {
        "quantized_matmul": lambda w: gg.quantized_matmul(mx.ones((2, 256)), w, "q4_k"),
        "gather_qmm": lambda w: gg.gather_qmm(mx.ones((2, 256)), w[None], "q4_k"),
        "dequantize": lambda w: gg.dequantize(w, "q4_k"),
    }
    for op, fun in bytes_of.items():
        y = fun(packed_w)
        expected = rf"\[{op}::vjp\] Expected a derivative with respect to activations\. Received"
        with pytest.raises(ValueError, match=expected):
            mx.vjp(fun, [packed_w], [mx.ones(y.shape)])
        with pytest.raises(ValueError, match=rf"\[{op}::jvp\]"):
            mx.jvp(fun, [packed_w], [mx.ones_like(packed_w)])
        # Plain weights come through a view of their bytes, which has no derivative either.
        with pytest.raises((ValueError, RuntimeError)):
            mx.eval(mx.grad(functions[op])(w))


# vmap


def axes_of(a, axis):
    """The array with its first axis moved, laid out anew, so that its strides are plain."""
    return mx.contiguous(mx.moveaxis(a, 0, axis))


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_vmap_over_any_axis_of_x(rank, transpose, rng):
    w = packed(rng, 5, 256)
    inner = 256 if transpose else 5
    x, _ = activations((4, *(2, 3)[: rank - 1], inner), mx.float32, rng)

    def fun(x):
        return gg.quantized_matmul(x, w, "q4_k", transpose)

    expected = mx.stack([fun(a) for a in x])
    for axis in range(x.ndim):
        assert close(mx.vmap(fun, in_axes=axis)(axes_of(x, axis)), expected), axis
        out = mx.vmap(fun, in_axes=axis, out_axes=rank)(axes_of(x, axis))
        assert close(out, mx.moveaxis(expected, 0, rank)), axis


@pytest.mark.parametrize("qtype", ["q4_k", "q8_0", "f32", "bf16"])
@pytest.mark.parametrize(
    ("x_shape", "w_shape"),
    [
        (x, w)
        for x in ((256,), (3, 256), (2, 3, 256), (4, 1, 3, 256))
        for w in ((5,), (2, 5), (4, 1, 5))
        if len(x) > 1 or len(w) == 1
    ],
)
def test_vmap_over_any_axes_of_x_and_w_and_c(qtype, x_shape, w_shape, rng):
    B = 3
    x, _ = activations((B, *x_shape), mx.float32, rng)
    w = packed(rng, B, *w_shape, 256, qtype=qtype)
    if qtype in DTYPES:
        w = mx.view(w, DTYPES[qtype])

    def fun(x, w, c):
        return gg.quantized_addmm(c, x, w, qtype, 0.5, 2.0)

    full = fun(x[0], w[0], mx.array(0.0)).shape
    c, _ = activations((B, full[-1]), mx.float32, rng)
    big, _ = activations((B, *full), mx.float32, rng)
    for mapped in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)):
        for cs in (c, big):
            arrays = (x, w, cs)
            expected = mx.stack(
                [
                    fun(*(a[b] if m else a[0] for a, m in zip(arrays, mapped, strict=True)))
                    for b in range(B)
                ]
            )
            for last in (False, True):
                axes = [
                    (a.ndim - 1 if last else 0) if m else None
                    for a, m in zip(arrays, mapped, strict=True)
                ]
                args = [
                    a[0] if axis is None else axes_of(a, axis)
                    for a, axis in zip(arrays, axes, strict=True)
                ]
                y = mx.vmap(fun, in_axes=tuple(axes))(*args)
                assert close(y, expected), f"{axes} c {cs.shape}"


def test_vmap_nests(rng):
    x, _ = activations((2, 3, 4, 256), mx.float32, rng)
    w = packed(rng, 3, 5, 256)
    fun = lambda x, w: gg.quantized_matmul(x, w, "q4_k")  # noqa: E731
    inner = mx.vmap(fun, in_axes=(0, 0))
    y = mx.vmap(inner, in_axes=(0, None))(x, w)
    assert mx.array_equal(y, fun(x, w))
    y = mx.vmap(mx.vmap(fun, in_axes=(None, 0)), in_axes=(0, None))(x[:, 0], w)
    expected = mx.stack([mx.stack([fun(a, b) for b in w]) for a in x[:, 0]])
    assert mx.array_equal(y, expected)


def test_vmap_of_grad_and_grad_of_vmap(rng):
    w = packed(rng, 3, 5, 256)
    x, X = activations((3, 2, 256), mx.float32, rng)
    loss = lambda x, w: (gg.quantized_matmul(x, w, "q4_k") ** 2).sum()  # noqa: E731
    W = weights(w)
    expected = 2 * (X @ W) @ W.swapaxes(-1, -2)
    assert close(mx.vmap(mx.grad(loss))(x, w), expected)
    assert close(mx.grad(lambda x: mx.vmap(loss)(x, w).sum())(x), expected)


def test_vmap_of_nothing(rng):
    w = packed(rng, 5, 256)
    y = mx.vmap(lambda x: gg.quantized_matmul(x, w, "q4_k"))(mx.zeros((0, 2, 256)))
    assert np.array(y).shape == (0, 2, 5)


@pytest.mark.parametrize("transpose", [True, False])
def test_vmap_of_gather_over_each_input(transpose, rng):
    B, T, E, P = 2, 3, 4, 5
    inner = 256 if transpose else 6
    x, _ = activations((B, T, 2, inner), mx.float32, rng)
    w = packed(rng, B, E, 6, 256)
    lhs = mx.array(rng.integers(0, T, (B, P)))
    rhs = mx.array(rng.integers(0, E, (B, P)))

    def fun(x, w, lhs, rhs):
        return gg.gather_qmm(x, w, "q4_k", lhs, rhs, transpose)

    arrays = (x, w, lhs, rhs)
    for mask in range(1, 16):
        mapped = [bool(mask >> i & 1) for i in range(4)]
        pick = lambda b, m=mapped: [a[b if on else 0] for a, on in zip(arrays, m, strict=True)]  # noqa: E731
        expected = mx.stack([fun(*pick(b)) for b in range(B)])
        for last in (False, True):
            axes = [
                (a.ndim - 1 if last else 0) if on else None
                for a, on in zip(arrays, mapped, strict=True)
            ]
            args = [
                a[0] if axis is None else axes_of(a, axis)
                for a, axis in zip(arrays, axes, strict=True)
            ]
            y = mx.vmap(fun, in_axes=tuple(axes))(*args)
            assert close(y, expected), axes
    y = mx.vmap(mx.vmap(fun, in_axes=(None, None, 0, 0)), in_axes=(0, 0, None, None))(*arrays)
    expected = [[fun(x[b], w[b], lhs[p], rhs[p]) for p in range(B)] for b in range(B)]
    assert mx.array_equal(y, mx.stack([mx.stack(row) for row in expected]))
    assert np.array(mx.vmap(fun)(*(a[:0] for a in arrays))).shape[:2] == (0, P)


@pytest.mark.parametrize("qtype", ["q4_k", "q5_0", "f16"])
def test_vmap_of_dequantize(qtype, rng):
    w = packed(rng, 3, 2, 256, qtype=qtype)
    for a in (w, mx.view(w, mx.float16)) if qtype == "f16" else (w,):
        expected = gg.dequantize(a, qtype)
        for axis in range(3):
            y = mx.vmap(lambda w: gg.dequantize(w, qtype), in_axes=axis)(axes_of(a, axis))
            assert mx.array_equal(y, expected), axis


# compile and checkpoint


def test_compile_merges_only_what_is_equal(rng):
    x, _ = activations((2, 256), mx.float32, rng)
    c, _ = activations((2, 256), mx.float32, rng)
    w = mx.array(random_blocks("q4_0", 256, 256, rng))  # as many bytes in iq4_nl, square
    idx = mx.array([1, 0])
    w3 = w.reshape(2, 128, -1)[:, :64]
    x3 = x[:, None]
    calls = [
        lambda x, c, w: gg.quantized_matmul(x, w, "q4_0"),
        lambda x, c, w: gg.quantized_matmul(x, w, "iq4_nl"),
        lambda x, c, w: gg.quantized_matmul(x, w, "q4_0", False),
        lambda x, c, w: gg.quantized_addmm(c, x, w, "q4_0"),
        lambda x, c, w: gg.quantized_addmm(c, x, w, "q4_0", 2.0),
        lambda x, c, w: gg.quantized_addmm(c, x, w, "q4_0", 1.0, 2.0),
        lambda x, c, w: gg.quantized_addmm(c, x, w, "q4_0", 1.0, 1.0, False),
        lambda x, c, w: gg.dequantize(w, "q4_0")[:2],
        lambda x, c, w: gg.dequantize(w, "iq4_nl")[:2],
        lambda x, c, w: gg.dequantize(w, "q4_0", mx.float16)[:2].astype(mx.float32),
    ]
    # Outputs of the compiled function are never merged, so each is used once more.
    expected = [-fun(x, c, w) for fun in calls]
    compiled = mx.compile(lambda x, c, w: [-fun(x, c, w) for fun in calls])(x, c, w)
    for i, (a, b) in enumerate(zip(compiled, expected, strict=True)):
        assert mx.array_equal(a, b), f"call {i}"
    gathers = [
        lambda x, w: gg.gather_qmm(x, w, "q4_0", rhs_indices=idx),
        lambda x, w: gg.gather_qmm(x, w, "iq4_nl", rhs_indices=idx),
        lambda x, w: gg.gather_qmm(x, w, "q4_0", rhs_indices=mx.array([0, 1])),
        lambda x, w: gg.gather_qmm(x[..., :64], w, "q4_0", rhs_indices=idx, transpose=False),
    ]
    expected = [-fun(x3, w3) for fun in gathers]
    compiled = mx.compile(lambda x, w: [-fun(x, w) for fun in gathers])(x3, w3)
    for i, (a, b) in enumerate(zip(compiled, expected, strict=True)):
        assert mx.array_equal(a, b), f"gather {i}"


def test_compile_merges_equal_calls(rng, tmp_path):
    x, _ = activations((2, 256), mx.float32, rng)
    w = packed(rng, 5, 256)

    def twice(x):
        once, again = (gg.quantized_matmul(x, w, "q4_k") for _ in range(2))
        return mx.exp(once) + mx.sin(again)

    nodes = []
    for fun in (twice, mx.compile(twice)):
        mx.export_to_dot(str(tmp_path / "graph.dot"), fun(x))
        nodes.append((tmp_path / "graph.dot").read_text().count("GGUFQuantizedMatmul"))
    assert nodes == [2, 1]


def test_compile_fuses_around_the_operation(rng):
    x, _ = activations((2, 256), mx.float16, rng)
    w = packed(rng, 256, 256)

    def fun(x, w):
        y = mx.tanh(gg.quantized_matmul(x * 2 + 1, w, "q4_k"))
        return gg.quantized_matmul(mx.exp(y) * x, w, "q4_k", False)[:, ::2].T

    compiled = mx.compile(fun)
    for _ in range(2):
        assert mx.allclose(compiled(x, w), fun(x, w), rtol=5e-3, atol=5e-2)
    assert compiled(x[:1], w).shape == (128, 1)
    assert compiled(mx.broadcast_to(x[:1], (3, 256)), w).shape == (128, 3)


def test_shapeless_compile(rng):
    w = packed(rng, 5, 256)
    w3 = packed(rng, 3, 5, 256)

    def fun(x, c, rhs):
        y = gg.quantized_addmm(c, x, w, "q4_k", 2.0)
        lhs = mx.zeros_like(rhs)
        return y, gg.gather_qmm(x[None], w3, "q4_k", lhs, rhs), gg.dequantize(w, "q4_k")

    compiled = mx.compile(fun, shapeless=True)
    for M, P in ((2, 3), (1, 1), (9, 4)):
        x, _ = activations((M, 256), mx.float32, rng)
        c, _ = activations((M, 1), mx.float32, rng)
        rhs = mx.array(rng.integers(0, 3, P))
        for a, b in zip(compiled(x, c, rhs), fun(x, c, rhs), strict=True):
            assert mx.array_equal(a, b), (M, P)


def test_compile_of_grad(rng):
    w = packed(rng, 5, 256)
    x, X = activations((3, 256), mx.float32, rng)
    loss = lambda x: (gg.quantized_matmul(x, w, "q4_k") ** 2).sum()  # noqa: E731
    W = weights(w)
    for fun in (mx.compile(mx.grad(loss)), mx.grad(mx.compile(loss))):
        assert close(fun(x), 2 * (X @ W) @ W.T)


def test_checkpoint(rng):
    w = packed(rng, 256, 256)
    x, _ = activations((3, 256), mx.float32, rng)

    def layer(x):
        return mx.tanh(gg.quantized_matmul(x, w, "q4_k", True) * 0.01)

    def loss(layer, x):
        return layer(layer(x)).sum()

    expected = mx.grad(lambda x: loss(layer, x))(x)
    assert mx.array_equal(mx.grad(lambda x: loss(mx.checkpoint(layer), x))(x), expected)
