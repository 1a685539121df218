"""Layers that share a product: what they give, when they do not, and what they keep."""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from blocks import dequantize64, random_blocks
from mlx_gguf import _ext
from mlx_gguf.fused import fuse
from mlx_gguf.nn import QuantLinear
from oracle import activations, bits, check, interval, magnitudes

K = 256
ROWS = {"q_proj": 48, "k_proj": 16, "v_proj": 32, "gate_proj": 80, "up_proj": 80, "o_proj": 24}


class Block(nn.Module):
    """Layers with mlx-lm's names; `types` overrides q4_k."""

    def __init__(self, seed: int = 0, **types: str):
        super().__init__()
        rng = np.random.default_rng(seed)
        for name, N in ROWS.items():
            qtype = types.get(name, "q4_k")
            packed = random_blocks(qtype, N, K, rng)
            self[name] = QuantLinear.from_packed(mx.array(packed), qtype)

    def __call__(self, x: mx.array) -> list[mx.array]:
        return [self[name](x) for name in ROWS]


def counting(monkeypatch) -> list[int]:
    """Rows of w of every product from now on."""
    made: list[int] = []

    def count(name: str) -> None:
        product = getattr(_ext, name)

        def counted(x, w, *args, **kw):
            made.append(w.shape[0])
            return product(x, w, *args, **kw)

        monkeypatch.setattr(_ext, name, counted)

    count("quantized_matmul")
    count("quantized_matmul_parts")
    return made


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(K,), (1, 1, K), (8, K), (2, 3, K), (9, K), (0, K)])
def test_parts_are_the_layers_products(shape, dtype):
    block = Block()
    assert fuse(block) == 3
    x, X = activations(shape, dtype, np.random.default_rng(1))
    for name, y in zip(ROWS, block(x), strict=True):
        W = dequantize64(np.array(block[name].weight), "q4_k").T
        check(y, interval(X @ W, magnitudes(X, W, dtype), dtype), f"{name} {shape}")


def test_one_product_for_all(monkeypatch):
    block = Block()
    fuse(block)
    made = counting(monkeypatch)
    for shape in ((1, K), (1, K), (8, K)):
        block(mx.ones(shape))
    assert made == [96, 160, 24] * 3
    made.clear()
    block(mx.ones((9, K)))
    assert made == list(ROWS.values())


def test_types_apart_stay_apart(monkeypatch):
    block = Block(v_proj="q6_k", up_proj="q8_0")
    assert fuse(block) == 1
    assert fuse(block) == 0
    made = counting(monkeypatch)
    block(mx.ones((1, K)))
    assert made == [64, 32, 80, 80, 24]


def test_any_order_and_any_number_of_calls(monkeypatch):
    block = Block()
    x, z = mx.ones((1, K)), 2 * mx.ones((1, K))
    q, k, v = (bits(block[name](x)) for name in ("q_proj", "k_proj", "v_proj"))
    q2 = bits(block.q_proj(z))
    fuse(block)
    assert np.array_equal(bits(block.v_proj(x)), v)
    assert np.array_equal(bits(block.v_proj(x)), v)
    assert np.array_equal(bits(block.q_proj(z)), q2)
    assert np.array_equal(bits(block.q_proj(x)), q)
    assert np.array_equal(bits(block.k_proj(x)), k)


def test_nothing_is_kept_once_all_is_taken():
    block = Block()
    fuse(block)
    mx.eval(block(mx.ones((1, K))))
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert not block[name]._part.ready


def test_each_thread_has_its_own_parts(monkeypatch):
    """MLX is not safe where one lets go of parts that another evaluates."""
    block, plain = Block(), Block()
    fuse(block)
    x, z = mx.ones((1, K)), 2 * mx.ones((1, K))
    k, v = bits(plain.k_proj(x)), bits(plain.v_proj(x))
    made = counting(monkeypatch)
    block.q_proj(x)
    other = threading.Thread(target=block.q_proj, args=(z,))
    other.start()
    other.join()
    assert np.array_equal(bits(block.k_proj(x)), k)
    assert np.array_equal(bits(block.v_proj(x)), v)
    assert made == [96, 96]


def test_parameters_stay_what_they_were():
    block, plain = Block(), Block()
    fuse(block)
    for (name, a), (_, b) in zip(
        tree_flatten(block.parameters()), tree_flatten(plain.parameters()), strict=True
    ):
        assert np.array_equal(np.array(a), np.array(b)), name


@pytest.mark.parametrize("way", ["attribute", "item", "update", "load_weights"])
def test_a_new_weight_ends_the_group(way, tmp_path):
    block, other = Block(), Block(seed=5)
    fuse(block)
    x = mx.ones((1, K))
    block.q_proj(x)  # the others' parts are waiting
    weight = other.k_proj.weight
    if way == "attribute":
        block.k_proj.weight = weight
    elif way == "item":
        block.k_proj["weight"] = weight
    elif way == "update":
        block.update({"k_proj": {"weight": weight}})
    else:
        block.load_weights([("k_proj.weight", weight)], strict=False)
    assert block.q_proj._part is None
    assert np.array_equal(bits(block.k_proj(x)), bits(other.k_proj(x)))
    assert np.array_equal(bits(block.v_proj(x)), bits(Block().v_proj(x)))


def test_a_layer_alone_with_a_bias_is_left_alone():
    block = Block()
    block.q_proj.bias = mx.ones((48,))
    assert fuse(block) == 2
    assert block.q_proj._part is None
    assert block.k_proj._part is not None


@pytest.mark.parametrize("shape", [(K,), (1, 1, K), (2, 3, K), (9, K)])
def test_layers_with_biases(shape, monkeypatch):
    block, plain = Block(), Block()
    rng = np.random.default_rng(2)
    for name in ("q_proj", "k_proj", "v_proj"):
        bias = mx.array(rng.uniform(-1, 1, ROWS[name]).astype(np.float32))
        block[name].bias = plain[name].bias = bias
    assert fuse(block) == 3
    made = counting(monkeypatch)
    x, _ = activations(shape, mx.float32, rng)
    got = block(x)
    assert 96 in made or x.size > 8 * K
    for a, b in zip(got, plain(x), strict=True):
        assert np.array_equal(bits(a), bits(b))
    block.k_proj.bias = plain.k_proj.bias + 1
    assert block.q_proj._part is None
    assert mx.allclose(block.k_proj(x), plain.k_proj(x) + 1, atol=1e-4)
    assert np.array_equal(bits(block.v_proj(x)), bits(plain.v_proj(x)))


def test_gradients_and_compilation():
    block, plain = Block(), Block()
    fuse(block)

    def loss(model):
        return lambda x: sum(y.square().sum() for y in model(x))

    x = mx.random.normal((2, K))
    grad = mx.grad(loss(block))(x)
    assert mx.allclose(grad, mx.grad(loss(plain))(x), rtol=1e-4, atol=1e-2)
    compiled = mx.compile(loss(block))
    for scale in (1, 2):
        assert mx.allclose(compiled(scale * x), loss(plain)(scale * x), rtol=1e-4)


def test_threads_do_not_take_each_others_parts():
    block = Block()
    fuse(block)
    names = ("q_proj", "k_proj", "v_proj")
    right = {s: [bits(block[n](s * mx.ones((1, K)))) for n in names] for s in (1, 2, 3)}
    wrong = []

    def run(scale: int) -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            for _ in range(100):
                x = scale * mx.ones((1, K))
                ys = [block[n](x) for n in names]
                if not all(map(np.array_equal, map(bits, ys), right[scale])):
                    wrong.append(scale)

    threads = [threading.Thread(target=run, args=(s,)) for s in right]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# The operation behind it


def parts_and_split(M: int, ends: list[int], dtype=mx.float32, N: int = 96):
    rng = np.random.default_rng(M)
    w = mx.array(random_blocks("q4_k", N, K, rng))
    x, _ = activations((M, K), dtype, rng)
    return x, w, lambda x: _ext.quantized_matmul_parts(x, w, "q4_k", ends)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("ends", [[], [32], [1, 2, 95], [0, 48, 48, 96]])
@pytest.mark.parametrize("M", [0, 1, 5, 40])
def test_parts_equal_a_split(M, ends, dtype):
    x, w, op = parts_and_split(M, ends, dtype)
    whole = _ext.quantized_matmul(x, w, "q4_k")
    made, expected = op(x), mx.split(whole, ends, -1)
    assert len(made) == len(expected)
    for a, b in zip(made, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.array_equal(bits(a), bits(b))
        # Reshaped and combined as models do, whatever its strides.
        assert np.array_equal(bits(mx.flatten(2 * a)), bits(mx.flatten(2 * b)))


@pytest.mark.parametrize("M", [1, 4])
def test_parts_are_turned_in_memory_of_their_own(M):
    """MLX's rotation gives its result the strides of its input, and so much memory."""
    _, _, op = parts_and_split(M, [32])
    x = mx.ones((1, M, K))

    def turned(part):
        heads = part.reshape(1, M, -1, 16).transpose(0, 2, 1, 3)
        return mx.fast.rope(heads, 16, traditional=False, base=1e4, scale=1.0, offset=3)

    parts = op(x)
    several = [turned(part) for part in parts * 8]
    mx.eval(several)
    for i, got in enumerate(several):
        assert np.array_equal(bits(got), bits(turned(mx.array(np.array(parts[i % 2])))))


def test_parts_have_derivatives_and_transformations():
    ends = [32, 80]
    x, w, op = parts_and_split(3, ends)

    def split(x):
        return mx.split(_ext.quantized_matmul(x, w, "q4_k"), ends, -1)

    def loss(parts):
        return lambda x: sum((i + 1) * p.square().sum() for i, p in enumerate(parts(x)))

    assert mx.allclose(mx.grad(loss(op))(x), mx.grad(loss(split))(x), rtol=1e-5)
    one = mx.ones_like(x)
    for got, want in zip(mx.jvp(op, [x], [one])[1], mx.jvp(split, [x], [one])[1], strict=True):
        assert mx.allclose(got, want, rtol=1e-5)
    batch = mx.stack([x, 2 * x, -x])
    for got, want in zip(mx.vmap(op)(batch), mx.vmap(split)(batch), strict=True):
        assert np.array_equal(bits(got), bits(want))
    for shapeless in (False, True):
        compiled = mx.compile(op, shapeless=shapeless)
        for inputs in (x, x[:1]):
            for got, want in zip(compiled(inputs), split(inputs), strict=True):
                assert np.array_equal(bits(got), bits(want))


def test_equal_products_in_a_compiled_function_are_one_only_if_they_end_alike():
    x, w, _ = parts_and_split(1, [])

    def both(x):
        return [_ext.quantized_matmul_parts(x, w, "q4_k", ends)[0] for ends in ([32], [48], [32])]

    for got, N in zip(mx.compile(both)(x), (32, 48, 32), strict=True):
        assert got.shape == (1, N)


@pytest.mark.parametrize("ends", [[-1], [97], [40, 8]])
def test_ends_that_are_none_are_refused(ends):
    x, _, op = parts_and_split(1, ends)
    with pytest.raises(ValueError, match=r"\[quantized_matmul_parts\] Expected ends that ascend"):
        op(x)
