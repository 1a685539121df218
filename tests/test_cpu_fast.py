"""Normalisation, rotary positions and attention on the CPU, against float64 and MLX's own."""

from __future__ import annotations

from functools import cache
from itertools import count, product

import mlx.core as mx
import numpy as np
import pytest

from mlx_gguf import _ext, cpu_fast
from oracle import DTYPES, activations, float64, relative_error, rounded
from subprocesses import run

#: Relative to what is added up, before a result is rounded to its dtype.
TOLERANCE = 2e-6
FLOATS = list(DTYPES.values())
ROPE = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": 0}

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def check(y: mx.array, ref: np.ndarray, terms: np.ndarray, dtype: mx.Dtype, where="") -> None:
    """`y` is `ref`, off by TOLERANCE of `terms` and then rounded once."""
    assert y.dtype == dtype, where
    assert y.shape == ref.shape, where
    slack = TOLERANCE * terms
    got = float64(y)
    low, high = rounded(ref - slack, dtype), rounded(ref + slack, dtype)
    wrong = ~((low <= got) & (got <= high))
    assert not wrong.any(), f"{where}: {wrong.sum()} of {ref.size}, {relative_error(got, ref)}"
    if dtype == mx.float32:
        assert relative_error(got, ref) < TOLERANCE, where


def laid_out(shape, dtype, rng, layout: str):
    """Random numbers whose axes lie in memory as a model's do."""
    if layout == "plain":
        return activations(shape, dtype, rng)
    *outer, n, last = shape
    if layout == "cache":  # a part of a longer buffer
        x, ref = activations((*outer, n + 19, last), dtype, rng)
        return x[..., :n, :], ref[..., :n, :]
    if layout == "heads":  # the heads of a token together
        swapped = (0, 2, 1, 3)
        x, ref = activations(tuple(shape[i] for i in swapped), dtype, rng)
        return x.transpose(*swapped), ref.transpose(*swapped)
    assert layout == "strided"  # the last axis is not the innermost
    x, ref = activations((*outer, last, n), dtype, rng)
    return x.swapaxes(-1, -2), ref.swapaxes(-1, -2)


LAYOUTS = ("plain", "cache", "heads", "strided")


# RMS normalisation


def rms_reference(x, w, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * (1.0 if w is None else w)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(dtype, layout, rng):
    for n, weighted, rows in product((1, 15, 64, 80, 257, 640), (True, False), (1, 5, 300)):
        x, x64 = laid_out((2, 3, rows, n), dtype, rng, layout)
        w, w64 = activations((n,), dtype, rng) if weighted else (None, None)
        ref = rms_reference(x64, w64, 1e-5)
        y = cpu_fast.rms_norm(x, w, 1e-5)
        check(y, ref, np.abs(ref), dtype, f"{n} {weighted} {rows}")


@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(FLOATS, FLOATS)))
def test_rms_norm_of_two_dtypes(x_dtype, w_dtype, rng):
    x, x64 = activations((4, 96), x_dtype, rng)
    w, w64 = activations((192,), w_dtype, rng)
    ref = rms_reference(x64, w64[::2], 1e-6)
    y = cpu_fast.rms_norm(x, w[::2], 1e-6)
    assert y.dtype == cpu_fast._mlx_rms_norm(x, w[::2], 1e-6).dtype
    check(y, ref, np.abs(ref), y.dtype)


def test_rms_norm_beyond_the_range_of_float16():
    x = mx.full((2, 64), 60000.0, mx.float16)
    assert mx.array_equal(cpu_fast.rms_norm(x, None, 1e-6), mx.ones_like(x))
    assert mx.array_equal(cpu_fast.rms_norm(mx.zeros((2, 64)), None, 1e-6), mx.zeros((2, 64)))


# Rotary positions


def rope_reference(x, dims, traditional, base, scale, offset, freqs=None):
    """x [B, H, T, D] in float64; the result, and the size of its terms."""
    B, _, T, _ = x.shape
    half = dims // 2
    speeds = base ** (-np.arange(half) / half) if freqs is None else 1 / freqs
    first = np.broadcast_to(np.asarray(offset, np.float64), (B,))
    angles = (first[:, None, None, None] + np.arange(T)[:, None]) * scale * speeds
    cos, sin = np.cos(angles), np.sin(angles)
    y, terms = x.copy(), np.abs(x)
    first = slice(0, dims, 2) if traditional else slice(0, half)
    second = slice(1, dims, 2) if traditional else slice(half, dims)
    a, b = x[..., first], x[..., second]
    y[..., first], y[..., second] = a * cos - b * sin, a * sin + b * cos
    terms[..., first] = terms[..., second] = np.abs(a) + np.abs(b)
    return y, terms


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rope(dtype, traditional, layout, rng):
    scales = [1.0, 0.125, 1.0, 40.0]
    offsets = [0, 7, 1000003, mx.array(5), mx.array([3], mx.uint32), mx.array([11, 0])]
    for i, (dims, D) in enumerate([(64, 64), (128, 128), (80, 96), (6, 10), (256, 256)]):
        for j, (offset, T) in enumerate(product(offsets, (1, 9, 130))):
            x, x64 = laid_out((2, 3, T, D), dtype, rng, layout)
            scale = scales[(i + j) % len(scales)]
            base = 1e6 if j % 2 else 1e4
            y = cpu_fast.rope(
                x, dims, traditional=traditional, base=base, scale=scale, offset=offset
            )
            ref, terms = rope_reference(x64, dims, traditional, base, scale, np.array(offset))
            check(y, ref, terms, dtype, f"{dims} {D} {T} {offset} {scale}")


def test_rope_with_frequencies(rng):
    freqs = np.append(np.linspace(1, 5000, 31), np.inf).astype(np.float32)
    for traditional, offset in product((False, True), (0, mx.array([9, 100]))):
        x, x64 = activations((2, 4, 3, 80), mx.float32, rng)
        arguments = {"traditional": traditional, "scale": 2.0, "offset": offset}
        y = cpu_fast.rope(x, 64, base=None, freqs=mx.array(freqs), **arguments)
        ref, terms = rope_reference(
            x64, 64, traditional, None, 2.0, np.array(offset), freqs.astype(np.float64)
        )
        check(y, ref, terms, mx.float32)
        # Frequencies of another dtype and with gaps.
        wide = mx.array(np.repeat(freqs, 2)).astype(mx.float16)[::2]
        y = cpu_fast.rope(x, 64, base=None, freqs=wide, **arguments)
        ref, terms = rope_reference(
            x64, 64, traditional, None, 2.0, np.array(offset), float64(wide)
        )
        check(y, ref, terms, mx.float32)


@pytest.mark.parametrize("shape", [(2, 5, 16), (2, 3, 4, 5, 16), (1, 2, 0, 16)])
def test_rope_of_other_ranks(shape, rng):
    x, _ = activations(shape, mx.float32, rng)
    kw = ROPE | {"offset": mx.array([4] * shape[0])}
    y, expected = cpu_fast.rope(x, 8, **kw), cpu_fast._mlx_rope(x, 8, **kw)
    assert y.shape == expected.shape
    assert mx.allclose(y, expected, rtol=0, atol=1e-6)


# Attention

HEADS = [(1, 1), (3, 3), (3, 1), (4, 1), (8, 4), (8, 8)]


def masked_scores(scores, mask, dtype=None):
    """scores [B, H, L, S] in float64; mask: None, "causal" or numbers."""
    L, S = scores.shape[-2:]
    if mask is None:
        return scores
    if isinstance(mask, str):
        mask = np.arange(S) <= np.arange(L)[:, None] + (S - L)
    if mask.dtype == bool:
        return np.where(mask, scores, -float(np.finfo(np.float32).max))
    return scores + mask


def attention_reference(q, k, v, scale, mask=None):
    """In float64; the result, and the size of its terms."""
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, 1), np.repeat(v, repeats, 1)
    scores = masked_scores(scale * q @ k.swapaxes(-1, -2), mask)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p @ v, p @ np.abs(v)


def a_mask(kind: str, B, H, L, S, rng):
    """A mask for attention, and the same for the reference."""
    if kind in ("none", "causal"):
        return (None, None) if kind == "none" else (kind, kind)
    if kind == "window":  # each query sees few keys, so whole blocks are left out
        at = np.arange(L)[:, None] + max(0, S - L)
        mask = (np.arange(S) <= at) & (np.arange(S) > at - 20)
    elif kind == "random":  # and the first query sees nothing
        mask = rng.random((B, H, L, S)) < 0.3
        mask[:, :, 0] = False
    elif kind == "keys":  # as left padding
        mask = np.arange(S) >= rng.integers(0, S, (B, 1, 1, 1))
    elif kind == "added":
        mask = rng.uniform(-3, 3, (H, L, S)).astype(np.float16)
        mask[..., 1::7] = -np.inf
        return mx.array(mask), mask.astype(np.float64)
    else:
        assert kind == "scalar"
        return mx.array(0.5, mx.float16), np.array(0.5)
    return mx.array(mask), mask


MASKS = ("none", "causal", "window", "random", "keys", "added", "scalar")
DIMS, QUERIES, KEYS = (64, 80, 96, 128, 256), (1, 2, 7, 65), (1, 5, 64, 65, 700)


@pytest.mark.parametrize("mask", MASKS)
def test_attention(mask, rng):
    turn = count()
    for D, L, S in product(DIMS, QUERIES, KEYS):
        i = next(turn)
        H, Hk = HEADS[i % len(HEADS)]
        # The added mask is float16, which every output's dtype can take.
        dtype = mx.float16 if mask in ("added", "scalar") and i % 2 else FLOATS[i % 3]
        if mask in ("added", "scalar") and dtype == mx.bfloat16:
            dtype = mx.float32
        layout = [LAYOUTS[(i + n) % 4] for n in range(3)]
        q, q64 = laid_out((2, H, L, D), dtype, rng, layout[0])
        k, k64 = laid_out((2, Hk, S, D), dtype, rng, layout[1])
        v, v64 = laid_out((2, Hk, S, D), dtype, rng, layout[2])
        m, m64 = a_mask(mask, 2, H, L, S, rng)
        scale = 3 * D**-0.5
        y = cpu_fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=m)
        ref, terms = attention_reference(q64, k64, v64, float(np.float32(scale)), m64)
        check(y, ref, terms, dtype, f"{H}/{Hk} {D} {L} {S} {dtype} {layout}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("D", "Dv"), [(8, 8), (1, 3), (72, 64), (192, 128), (64, 100)])
def test_attention_of_other_widths(D, Dv, dtype, rng):
    q, q64 = activations((1, 6, 5, D), dtype, rng)
    k, k64 = activations((1, 2, 70, D), dtype, rng)
    v, v64 = activations((1, 2, 70, Dv), dtype, rng)
    y = cpu_fast.scaled_dot_product_attention(q, k, v, scale=0.5)
    check(y, *attention_reference(q64, k64, v64, 0.5), dtype)


def test_attention_with_more_heads_than_rows_of_a_task(rng):
    q, q64 = activations((1, 71, 3, 64), mx.float32, rng)
    k, k64 = activations((1, 1, 130, 64), mx.float32, rng)
    for kind in ("causal", "window"):
        m, m64 = a_mask(kind, 1, 71, 3, 130, rng)
        y = cpu_fast.scaled_dot_product_attention(q, k, k, scale=0.3, mask=m)
        check(y, *attention_reference(q64, k64, k64, float(np.float32(0.3)), m64), mx.float32)


def test_large_scores_do_not_overflow(rng):
    q, q64 = activations((1, 2, 3, 64), mx.float32, rng)
    k, k64 = activations((1, 2, 600, 64), mx.float32, rng)
    y = cpu_fast.scaled_dot_product_attention(q, k, k, scale=100.0)
    # Scores of a thousand are off by more than they are of tens.
    expected = attention_reference(q64, k64, k64, 100.0)[0]
    assert relative_error(float64(y), expected) < 1e-3


def test_hidden_rows_are_those_of_mlx(rng):
    q, _ = activations((1, 4, 9, 64), mx.float32, rng)
    k, _ = activations((1, 2, 5, 64), mx.float32, rng)
    none = mx.zeros((9, 5), mx.bool_)
    for mask in ("causal", none, mx.where(none, 0.0, -mx.inf)):
        y = cpu_fast.scaled_dot_product_attention(q, k, k, scale=1.0, mask=mask)
        expected = cpu_fast._mlx_attention(q, k, k, scale=1.0, mask=mask)
        assert mx.allclose(y, expected, rtol=0, atol=1e-6, equal_nan=True)
    nan = mx.array(np.where(np.arange(64) == 3, np.nan, 1.0).astype(np.float32))
    assert mx.isnan(cpu_fast.scaled_dot_product_attention(q * nan, k, k, scale=1.0)).all()


def test_a_query_does_not_depend_on_the_others(rng):
    q, _ = activations((1, 4, 130, 96), mx.float32, rng)
    k, _ = activations((1, 2, 300, 96), mx.float32, rng)
    together = cpu_fast.scaled_dot_product_attention(q, k, k, scale=0.2)
    for n in (1, 2, 3, 5):
        some = cpu_fast.scaled_dot_product_attention(q[:, :, :n], k, k, scale=0.2)
        assert mx.array_equal(some, together[:, :, :n])


# logsumexp


@pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES)
def test_logsumexp_equals_float64(dtype, rng):
    for shape in ((1,), (1, 15), (3, 16), (2, 3, 17), (1, 20_001), (2, 8192)):
        x = mx.array(8 * rng.standard_normal(shape).astype(np.float32)).astype(dtype)
        X = float64(x)
        most = X.max(-1, keepdims=True)
        ref = most + np.log(np.exp(X - most).sum(-1, keepdims=True))
        y = cpu_fast.logsumexp(x, -1, True)
        check(y, ref, np.abs(ref) + 1, dtype, f"{shape}")
        assert mx.array_equal(cpu_fast.logsumexp(x, axis=x.ndim - 1), mx.squeeze(y, -1))
        strided = mx.broadcast_to(x[..., None], (*shape, 2))[..., 1]
        assert mx.array_equal(cpu_fast.logsumexp(strided, -1, True), y)
    logits = mx.array(rng.standard_normal((1, 300)).astype(np.float32))
    assert cpu_fast.logsumexp(logits, keepdims=True).shape == (1, 1)
    assert cpu_fast.logsumexp(logits).shape == ()


def test_logsumexp_of_numbers_that_are_not_finite_equals_mlx(rng):
    base = rng.standard_normal((6, 40)).astype(np.float32)
    base[0, 3] = np.inf
    base[1, 5] = -np.inf
    base[2] = -np.inf
    base[3, 7] = np.nan
    base[4, 1], base[4, 2] = np.inf, -np.inf
    x = mx.array(base)
    ours, theirs = cpu_fast.logsumexp(x, -1), cpu_fast._mlx_logsumexp(x, -1)
    assert np.allclose(np.array(ours), np.array(theirs), rtol=1e-6, equal_nan=True)


def test_logsumexp_over_other_axes_and_under_transformations_is_mlx(rng):
    x, _ = activations((3, 5), mx.float32, rng)
    assert mx.array_equal(cpu_fast.logsumexp(x, 0), cpu_fast._mlx_logsumexp(x, 0))
    assert mx.array_equal(cpu_fast.logsumexp(x), cpu_fast._mlx_logsumexp(x))
    grad = mx.grad(lambda x: cpu_fast.logsumexp(x, -1).sum())(x)
    assert mx.allclose(grad, mx.softmax(x, -1), rtol=1e-5, atol=1e-6)
    mapped = mx.vmap(lambda row: cpu_fast.logsumexp(row, -1))(x)
    assert mx.allclose(mapped, cpu_fast._mlx_logsumexp(x, -1), rtol=1e-6)


# Instruction sets and threads

COMPUTE = """
import sys
import mlx.core as mx, numpy as np
from mlx_gguf import _ext, cpu_fast, gated_delta
rng = np.random.default_rng(0)
out = {"isa": np.array(_ext.cpu_isa()), "threads": np.array(_ext.cpu_threads())}
def a(*shape):
    return mx.array(rng.uniform(-1, 1, shape).astype(np.float32))
with mx.stream(mx.cpu):
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        x = a(2, 70, 4, 80).astype(dtype).transpose(0, 2, 1, 3)
        y = {"rms": cpu_fast.rms_norm(x, a(80).astype(dtype), 1e-5)}
        y |= {"silu": cpu_fast.silu(8 * x), "gelu": cpu_fast.gelu_approx(8 * x)}
        for traditional in (False, True):
            y[f"rope {traditional}"] = cpu_fast.rope(
                x, 64, traditional=traditional, base=1e4, scale=1.0, offset=12345)
        for L, S, mask in [(1, 2000, None), (70, 1000, "causal"), (70, 300, a(70, 300) > 0.5)]:
            k, v = a(2, 2, S, 80).astype(dtype), a(2, 2, S, 96).astype(dtype)
            y[f"attention {L}"] = cpu_fast.scaled_dot_product_attention(
                x[:, :, :L], k, v, scale=0.5, mask=mask)
        k, v = (a(2, 70, 4, n).astype(dtype) / 8 for n in (64, 32))
        g, beta = a(2, 70, 4) / 2 + 0.5, a(2, 70, 4).astype(dtype)
        y["delta"], y["state"] = gated_delta.gated_delta_ops(k, k, v, g, beta, a(2, 4, 32, 64))
        out |= {f"{dtype} {name}": np.array(v.astype(mx.float32)) for name, v in y.items()}
np.savez(sys.argv[1], **out)
"""


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    @cache
    def compute(**env):
        path = tmp_path_factory.mktemp("fast") / "out.npz"
        run(COMPUTE, str(path), **env)
        return dict(np.load(path))

    return lambda **env: compute(**env)


@pytest.mark.parametrize("isa", _ext.cpu_isas())
def test_each_instruction_set_gives_the_same_results(isa, computed):
    best, other = computed(), computed(MLX_GGUF_ISA=isa)
    assert str(other["isa"]) == isa
    units = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
    names = [name for name in best if name.startswith("mlx")]
    assert len(names) == 3 * 9
    for name in names:
        bound = units[name.split()[0].rpartition(".")[2]]
        error = np.linalg.norm((other[name] - best[name]).astype(np.float64))
        assert error <= bound * np.linalg.norm(best[name].astype(np.float64)), name


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads, computed):
    default, other = computed(), computed(MLX_GGUF_NUM_THREADS=str(threads))
    assert int(other["threads"]) == threads
    for name in default:
        if name != "threads":
            assert default[name].tobytes() == other[name].tobytes(), name
