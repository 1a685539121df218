"""Any shape and any strides give what contiguous copies give."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks, row_bytes
from oracle import DTYPES, activations, bits, check, interval, magnitudes

fast = settings(max_examples=120, deadline=None, database=None, derandomize=True)
# One type of each block size and plain ones.
some_types = st.sampled_from(["q4_0", "q8_0", "q5_1", "mxfp4", "q4_k", "q6_k", "f16", "f32"])
dtypes = st.sampled_from(list(DTYPES.values()))


@st.composite
def views(draw, shape: tuple[int, ...], keep_last: bool = False):
    """A function that makes a lazy strided view of `shape` out of an array it is given the
    shape of: steps of either sign, offsets, transposed and broadcast axes.

    keep_last: the last axis may be cut but not stepped through or moved, as rows of blocks.
    """
    rank = len(shape)
    order = list(draw(st.permutations(range(rank - keep_last))))
    order += [rank - 1] if keep_last else []
    steps, sources, slices = [], [], []
    for axis, n in enumerate(shape):
        whole = keep_last and axis == rank - 1
        step = 1 if whole else draw(st.sampled_from([1, 1, 2, 3, -1, -2, 0]))
        before = 0 if whole else draw(st.integers(0, 2))
        after = 0 if whole else draw(st.integers(0, 2))
        steps.append(step)
        if step == 0 and n > 0:
            sources.append(1)
            slices.append(slice(None))
            continue
        length = max(n - 1, 0) * max(abs(step), 1) + (n > 0)
        sources.append(before + length + after)
        first = before if step > 0 else before + length - 1
        if n == 0:
            slices.append(slice(0, 0))
        elif step > 0:
            slices.append(slice(first, first + length, step))
        else:
            stop = before - 1
            slices.append(slice(first, None if stop < 0 else stop, step))

    def make(source: mx.array) -> mx.array:
        inverse = np.argsort(order).tolist()
        moved = source.transpose(order)  # laid out in another order of axes
        moved = mx.contiguous(moved).transpose(inverse)
        return mx.broadcast_to(moved[tuple(slices)], shape)

    return tuple(sources), make


@st.composite
def problems(draw):
    qtype = draw(some_types)
    K = TYPES[qtype] * draw(st.integers(1, 3)) if TYPES[qtype] > 1 else draw(st.integers(1, 40))
    N = draw(st.integers(0, 19))
    batch = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    w_batch = tuple(1 if draw(st.booleans()) else n for n in batch[draw(st.integers(0, 2)) :])
    M = draw(st.integers(0, 11))
    transpose = draw(st.booleans())
    x_shape = (*batch, M, K if transpose else N)
    return {
        "qtype": qtype,
        "dtype": draw(dtypes),
        "transpose": transpose,
        "x": draw(views(x_shape)),
        "w": draw(views((*w_batch, N, row_bytes(qtype, K)), keep_last=True)),
        "c": draw(views(tuple(1 if draw(st.booleans()) else n for n in (*batch, M, 1)))),
        "K": K,
        "lazy": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@given(problems())
@fast
def test_any_strides_of_x_w_and_c(problem):
    rng = np.random.default_rng(problem["seed"])
    qtype, dtype, transpose = (problem[k] for k in ("qtype", "dtype", "transpose"))
    (x_source, x_view), (w_source, w_view) = problem["x"], problem["w"]
    c_source, c_view = problem["c"]
    x = x_view(activations(x_source, dtype, rng)[0])
    rows = int(np.prod(w_source[:-1]))
    w = mx.array(random_blocks(qtype, rows, problem["K"], rng).reshape(w_source))
    w = w_view(w)
    c = c_view(activations(c_source, dtype, rng)[0])
    if not problem["lazy"]:
        mx.eval(x, w, c)
    y = gg.quantized_matmul(x, w, qtype, transpose)
    z = gg.quantized_addmm(c, x, w, qtype, 0.5, 2.0, transpose)

    X, C = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, c))
    W = dequantize64(np.array(w), qtype)
    W = W.swapaxes(-1, -2) if transpose else W
    where = f"x {x.shape} w {w.shape} c {c.shape} {qtype} {dtype} transpose={transpose}"
    sums = magnitudes(X, W, dtype)
    check(y, interval(X @ W, sums, dtype), where)
    check(z, interval(0.5 * X @ W + 2 * C, 0.5 * sums + 2 * np.abs(C), dtype), where)


@st.composite
def gathers(draw):
    E, N, M, T = (draw(st.integers(1, 4)) for _ in range(4))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=3)))
    lhs = tuple(1 if draw(st.booleans()) else n for n in shape)
    rhs = tuple(1 if draw(st.booleans()) else n for n in shape[draw(st.integers(0, 3)) :])
    return {
        "x": draw(views((T, 2, M, 64))),
        "w": draw(views((E, N, 68), keep_last=True)),
        "lhs": draw(views(lhs)),
        "rhs": draw(views(rhs)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@given(gathers())
@fast
def test_any_strides_of_gather(problem):
    rng = np.random.default_rng(problem["seed"])
    source, view = problem["x"]
    x = view(activations(source, mx.float32, rng)[0])
    source, view = problem["w"]
    w = view(mx.array(random_blocks("q8_0", int(np.prod(source[:-1])), 64, rng).reshape(source)))
    lhs, rhs = (
        view(mx.array(rng.integers(0, limit, source)))
        for (source, view), limit in (
            (problem["lhs"], x.shape[0] * 2),
            (problem["rhs"], w.shape[0]),
        )
    )
    y = gg.gather_qmm(x, w, "q8_0", lhs, rhs)
    X, W = np.array(x).astype(np.float64), dequantize64(np.array(w), "q8_0").swapaxes(1, 2)
    L, R = np.broadcast_arrays(np.array(lhs), np.array(rhs))
    X, W = X.reshape(-1, *X.shape[2:])[L], W[R]
    expected = interval(X @ W, magnitudes(X, W, mx.float32), mx.float32)
    check(y, expected, f"x {x.shape} w {w.shape} lhs {lhs.shape} rhs {rhs.shape}")


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_x_of_any_rank(rank):
    rng = np.random.default_rng(0)
    w = mx.array(random_blocks("q4_k", 7, 256, rng))
    x, _ = activations((*(2, 1, 3, 2)[5 - rank :], 256), mx.float32, rng)
    y = gg.quantized_matmul(x, w, "q4_k")
    assert y.shape == (*x.shape[:-1], 7)
    flat = gg.quantized_matmul(x.reshape(-1, 256), w, "q4_k")
    assert np.array_equal(bits(y).ravel(), bits(flat).ravel())


@pytest.mark.parametrize("cut", [slice(None, 5), slice(5, None), slice(None, None, 2)])
def test_unevaluated_slices_of_weights(cut):
    rng = np.random.default_rng(0)
    x, _ = activations((2, 256), mx.float32, rng)
    w = mx.array(random_blocks("q4_k", 12, 256, rng))
    expected = gg.quantized_matmul(x, mx.array(np.array(w)[cut].copy()), "q4_k")
    fresh = mx.concatenate([w[:6], w[6:]])  # itself not evaluated yet
    assert mx.array_equal(gg.quantized_matmul(x, fresh[cut], "q4_k"), expected)
    assert mx.array_equal(gg.quantized_matmul(x, w[cut], "q4_k"), expected)
    evaluated = w[cut]
    mx.eval(evaluated)
    assert mx.array_equal(gg.quantized_matmul(x, evaluated, "q4_k"), expected)


def test_weights_that_repeat_along_a_broadcast_batch():
    rng = np.random.default_rng(0)
    x, _ = activations((3, 2, 256), mx.float32, rng)
    w = mx.array(random_blocks("q4_k", 5, 256, rng))
    expected = gg.quantized_matmul(x, w, "q4_k")
    for batch in ((3,), (1,), (2, 3), (2, 1)):
        y = gg.quantized_matmul(x, mx.broadcast_to(w, (*batch, *w.shape)), "q4_k")
        assert mx.array_equal(y, mx.broadcast_to(expected, y.shape)), batch
