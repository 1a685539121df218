"""The layers in the places of their mlx.nn and mlx-lm namesakes."""

from __future__ import annotations

import copy
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks
from oracle import DTYPES, activations, float64

typed = pytest.mark.parametrize("qtype", TYPES)


def packed(rng, *shape, qtype="q4_k"):
    *outer, K = shape
    return mx.array(random_blocks(qtype, int(np.prod(outer)), K, rng).reshape(*outer, -1))


def dense(w: mx.array, qtype: str) -> mx.array:
    return mx.array(dequantize64(np.array(w), qtype).astype(np.float32))


def close(a, b, tolerance=2e-6) -> bool:
    a, b = float64(a), float64(b)
    return a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def names(tree) -> list[str]:
    return sorted(name for name, _ in tree_flatten(tree))


def linear_of(w: mx.array, bias: mx.array | None = None) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=bias is not None)
    layer.weight = w
    if bias is not None:
        layer.bias = bias
    return layer


# Against the dense layers


@typed
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_nn_linear(qtype, bias, rng):
    w = packed(rng, 33, 256, qtype=qtype)
    b = mx.array(rng.standard_normal(33).astype(np.float32)) if bias else None
    ours = gg.nn.QuantLinear.from_packed(w, qtype, b)
    theirs = linear_of(dense(w, qtype), b)
    assert ours.qtype == qtype
    for shape in ((256,), (3, 256), (2, 0, 256), (2, 3, 256)):
        x, _ = activations(shape, mx.float32, rng)
        assert close(ours(x), theirs(x)), shape
    assert ours(x.astype(mx.bfloat16)).dtype == mx.bfloat16


@typed
def test_embedding_equals_nn_embedding(qtype, rng):
    w = packed(rng, 33, 256, qtype=qtype)
    ours = gg.nn.QuantEmbedding.from_packed(w, qtype)
    theirs = nn.Embedding(33, 256)
    theirs.weight = dense(w, qtype)
    for ids in (mx.array(5), mx.array([3, 0, 32]), mx.array([[1, -1], [2, 2]]), mx.array([])):
        ids = ids.astype(mx.int32)
        assert np.array_equal(ours(ids), theirs(ids)), ids
    x, _ = activations((2, 3, 256), mx.float32, rng)
    assert close(ours.as_linear(x), theirs.as_linear(x))
    half = gg.nn.QuantEmbedding.from_packed(w, qtype, mx.bfloat16)
    assert half(mx.array([1])).dtype == mx.bfloat16
    assert mx.array_equal(half(mx.array([1])), theirs(mx.array([1])).astype(mx.bfloat16))


@typed
@pytest.mark.parametrize("bias", [False, True])
def test_switch_linear_equals_mlx_lm(qtype, bias, rng):
    w = packed(rng, 4, 33, 256, qtype=qtype)
    b = mx.array(rng.standard_normal((4, 33)).astype(np.float32)) if bias else None
    ours = gg.nn.QuantSwitchLinear.from_packed(w, qtype, b)
    theirs = SwitchLinear(256, 33, 4, bias=bias)
    theirs.weight = dense(w, qtype)
    if bias:
        theirs.bias = b
    assert (ours.input_dims, ours.output_dims, ours.num_experts) == (256, 33, 4)
    x, _ = activations((2, 3, 1, 1, 256), mx.float32, rng)
    idx = mx.array(rng.integers(0, 4, (2, 3, 2)))
    assert close(ours(x, idx), theirs(x, idx))
    flat = x.reshape(6, 1, 256)
    ordered = mx.sort(idx[..., 0].flatten())
    y = ours(flat, ordered, sorted_indices=True)
    assert close(y, theirs(flat, ordered, sorted_indices=True))


@pytest.mark.parametrize("tokens", [3, 40])  # mlx-lm sorts from 64 indices on
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_switch_glu_of_mlx_lm(tokens, dtype, rng):
    moe = SwitchGLU(256, 512, 4)
    ours = SwitchGLU(256, 512, 4)
    for name, (N, K) in {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}.items():
        w = packed(rng, 4, N, K, qtype="q5_k")
        ours[name + "_proj"] = gg.nn.QuantSwitchLinear.from_packed(w, "q5_k")
        moe[name + "_proj"].weight = dense(w, "q5_k")
    x, _ = activations((1, tokens, 256), DTYPES[dtype], rng)
    idx = mx.array(rng.integers(0, 4, (1, tokens, 2)))
    expected = moe(x.astype(mx.float32), idx)
    y = ours(x, idx)
    assert y.dtype == x.dtype
    assert close(y, expected, {"f32": 5e-6, "bf16": 2e-2}[dtype])


# As modules


@typed
def test_new_layers_are_zeros(qtype):
    K = TYPES[qtype] * 2
    linear = gg.nn.QuantLinear(K, 5, qtype=qtype.upper())
    assert np.array_equal(linear(mx.ones((3, K))), np.zeros((3, 5)))
    assert np.array_equal(gg.nn.QuantEmbedding(7, K, qtype=qtype)(mx.array([6])), np.zeros((1, K)))
    switch = gg.nn.QuantSwitchLinear(K, 5, 3, qtype=qtype)
    assert np.array_equal(switch(mx.ones((1, K)), mx.array([2])), np.zeros((1, 1, 5)))
    assert linear.qtype == qtype


def test_repr():
    assert repr(gg.nn.QuantLinear(512, 5, qtype="Q4_K")) == (
        "QuantLinear(input_dims=512, output_dims=5, bias=True, qtype=q4_k)"
    )
    assert repr(gg.nn.QuantEmbedding(7, 64, qtype="q8_0", dtype=mx.float16)) == (
        "QuantEmbedding(7, 64, qtype=q8_0, dtype=mlx.core.float16)"
    )
    assert repr(gg.nn.QuantSwitchLinear(64, 5, 3, False, qtype="q8_0")) == (
        "QuantSwitchLinear(input_dims=64, output_dims=5, num_experts=3, bias=False, qtype=q8_0)"
    )
    plain = gg.nn.QuantLinear.from_packed(mx.zeros((5, 33), mx.float16), "f16")
    assert "input_dims=33, output_dims=5, bias=False, qtype=f16" in repr(plain)
    assert "qtype=q8_0" in repr(nn.Sequential(gg.nn.QuantLinear(64, 5, qtype="q8_0")))


def test_errors_name_the_layer_and_what_was_found():
    for make, op in (
        (partial(gg.nn.QuantLinear, 256, 5), "QuantLinear"),
        (partial(gg.nn.QuantEmbedding, 5, 256), "QuantEmbedding"),
        (partial(gg.nn.QuantSwitchLinear, 256, 5, 3), "QuantSwitchLinear"),
    ):
        for qtype in ("q9_k", "iq1_s"):
            with pytest.raises(ValueError, match=rf"^\[{op}\] Expected .* Received '{qtype}'\."):
                make(qtype=qtype)
    with pytest.raises(ValueError, match=r"multiple of 256, the block size of q4_k. Received 640"):
        gg.nn.QuantLinear(640, 5, qtype="q4_k")
    layer = gg.nn.QuantLinear(256, 5, qtype="q4_k")
    with pytest.raises(ValueError, match=r"\[QuantLinear\] Expected ggml_type .* Received 99\."):
        layer.update({"ggml_type": mx.array(99, mx.uint8)})
    assert layer.qtype == "q4_k"


def test_parameters_freeze_and_unfreeze():
    layer = gg.nn.QuantLinear(256, 5, qtype="q4_k")
    assert names(layer.parameters()) == ["bias", "ggml_type", "weight"]
    assert names(layer.trainable_parameters()) == ["bias"]
    layer.freeze()
    assert names(layer.trainable_parameters()) == []
    for unfreeze in (
        lambda: layer.unfreeze(),
        lambda: layer.unfreeze(keys=["weight", "bias"]),
        lambda: nn.Sequential(layer).unfreeze(),
        lambda: nn.Sequential(layer).unfreeze(keys=["weight", "bias", "ggml_type"]),
        lambda: nn.Sequential(nn.Sequential(layer)).unfreeze(),
    ):
        layer.freeze()
        unfreeze()
        assert names(layer.trainable_parameters()) == ["bias"]
    assert names(nn.Sequential(layer).trainable_parameters()) == ["layers.0.bias"]
    for other in (
        gg.nn.QuantEmbedding(5, 256, qtype="q4_k"),
        gg.nn.QuantSwitchLinear(256, 5, 3, False, qtype="q4_k"),
    ):
        assert names(other.unfreeze().trainable_parameters()) == []


def test_update_replaces_weights_and_type(rng):
    layer = gg.nn.QuantLinear(256, 5, bias=False, qtype="q4_k")
    x, _ = activations((3, 256), mx.float32, rng)
    for qtype in ("q4_k", "q6_k", "mxfp4", "f16"):
        w = packed(rng, 5, 256, qtype=qtype)
        code = mx.array(gg.find_format(qtype).id, mx.uint8)
        layer.update({"weight": w, "ggml_type": code})
        assert layer.qtype == qtype
        assert close(layer(x), x @ dense(w, qtype).T)
    # The type may come before the weights, and weights of the same type alone.
    layer.ggml_type = mx.array(gg.find_format("q8_0").id, mx.uint8)
    layer.weight = w = packed(rng, 5, 256, qtype="q8_0")
    assert close(layer(x), x @ dense(w, "q8_0").T)


def test_copies_are_of_the_same_type(rng):
    w = packed(rng, 5, 256)
    layer = gg.nn.QuantLinear.from_packed(w, "q4_k", mx.ones((5,)))
    x, _ = activations((3, 256), mx.float32, rng)
    twin = copy.deepcopy(layer)
    assert twin.qtype == "q4_k"
    assert mx.array_equal(twin(x), layer(x))
    twin.unfreeze()
    assert names(twin.trainable_parameters()) == ["bias"]


class Net(nn.Module):
    def __init__(self, rng, qtype="q4_k"):
        super().__init__()
        self.embed = gg.nn.QuantEmbedding.from_packed(packed(rng, 11, 256, qtype=qtype), qtype)
        w, b = packed(rng, 256, 256, qtype=qtype), mx.ones((256,))
        self.layers = [gg.nn.QuantLinear.from_packed(w, qtype, b), nn.Linear(256, 256)]
        experts = packed(rng, 3, 256, 256, qtype=qtype)
        self.experts = gg.nn.QuantSwitchLinear.from_packed(experts, qtype)

    def __call__(self, ids, idx):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + mx.tanh(layer(x))
        return self.embed.as_linear(self.experts(x[:, None], idx[:, None])[:, 0, 0])


@pytest.fixture
def inputs():
    return mx.array([1, 10, 4]), mx.array([0, 2, 2])


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
@pytest.mark.parametrize("qtype", ["q4_k", "q8_0", "bf16"])
def test_saved_weights_load_with_their_type(ending, qtype, rng, inputs, tmp_path):
    net = Net(rng, qtype)
    expected = net(*inputs)
    path = str(tmp_path / f"w.{ending}")
    net.save_weights(path)
    same = Net(np.random.default_rng(1), qtype)
    assert not mx.array_equal(same(*inputs), expected)
    same.load_weights(path)
    assert mx.array_equal(same(*inputs), expected)
    # Into layers of another type: shapes differ, which only a strict load refuses.
    other = Net(np.random.default_rng(1), "q5_k")
    with pytest.raises(ValueError, match="shape"):
        other.load_weights(path)
    other.load_weights(path, strict=False)
    assert other.layers[0].qtype == other.experts.qtype == other.embed.qtype == qtype
    assert mx.array_equal(other(*inputs), expected)


def test_a_strict_load_restores_a_type_of_the_same_size(rng, tmp_path):
    # Blocks of both types are 18 bytes.
    w = packed(rng, 5, 64, qtype="iq4_nl")
    layer = gg.nn.QuantLinear.from_packed(w, "iq4_nl")
    layer.save_weights(str(tmp_path / "w.safetensors"))
    other = gg.nn.QuantLinear(64, 5, bias=False, qtype="q4_0")
    other(mx.ones((1, 64)))
    other.load_weights(str(tmp_path / "w.safetensors"))
    x, _ = activations((3, 64), mx.float32, rng)
    assert other.qtype == "iq4_nl"
    assert mx.array_equal(mx.compile(lambda x: other(x), inputs=[other.state])(x), layer(x))


def test_training_a_layer_in_a_stack(rng, inputs):
    net = Net(rng)
    net.freeze()
    net.layers[1].unfreeze()
    packed_before = {k: np.array(v) for k, v in tree_flatten(net.embed.parameters())}
    target = mx.array(rng.standard_normal((3, 11)).astype(np.float32))

    def loss(ids, idx):
        return ((net(ids, idx) - target) ** 2).mean()

    value, grads = nn.value_and_grad(net, loss)(*inputs)
    assert names(grads) == ["layers.1.bias", "layers.1.weight"]
    # Against the difference quotient of the loss along the gradient.
    g, weight, step = grads["layers"][1]["weight"], net.layers[1].weight, 1e-2
    direction = g / mx.linalg.norm(g)
    values = []
    for sign in (1, -1):
        net.layers[1].weight = weight + sign * step * direction
        values.append(loss(*inputs).item())
    net.layers[1].weight = weight
    slope = (values[0] - values[1]) / (2 * step)
    assert abs(slope - mx.linalg.norm(g).item()) < 0.05 * abs(slope)

    optimizer = optim.Adam(1e-3)
    state = [net.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(ids, idx):
        value, grads = nn.value_and_grad(net, loss)(ids, idx)
        optimizer.update(net, grads)
        return value

    losses = [step(*inputs).item() for _ in range(10)]
    assert losses[-1] < losses[0]
    assert net.embed.qtype == net.layers[0].qtype == "q4_k"
    for name, value in tree_flatten(net.embed.parameters()):
        assert np.array_equal(value, packed_before[name])


def test_training_everything_that_can_be_trained(rng, inputs):
    net = Net(rng)
    net.unfreeze()
    _, grads = nn.value_and_grad(net, lambda *a: net(*a).sum())(*inputs)
    assert names(grads) == ["layers.0.bias", "layers.1.bias", "layers.1.weight"]


def test_compile_with_the_state_as_input(rng, inputs):
    net = Net(rng)
    compiled = mx.compile(lambda *a: net(*a), inputs=net.state)
    first = compiled(*inputs)  # before any call outside
    assert close(first, net(*inputs), 1e-5)
    net.layers[0].bias = net.layers[0].bias + 1
    net.embed.weight = net.embed.weight[::-1]
    second = compiled(*inputs)
    assert not close(second, first, 1e-2)
    assert close(second, net(*inputs), 1e-5)


def test_vmap_and_checkpoint_of_a_layer(rng):
    layer = gg.nn.QuantLinear.from_packed(packed(rng, 256, 256), "q4_k", mx.ones((256,)))
    x, _ = activations((3, 2, 256), mx.float32, rng)
    assert mx.array_equal(mx.vmap(layer)(x), layer(x))
    loss = lambda f, x: mx.tanh(f(f(x) * 0.1)).sum()  # noqa: E731
    expected = mx.grad(lambda x: loss(layer, x))(x)
    checkpointed = nn.utils.checkpoint(layer)
    assert close(mx.grad(lambda x: loss(checkpointed, x))(x), expected)


def test_quantize_and_set_dtype_leave_packed_layers_alone(rng, inputs):
    net = Net(rng)
    before = {k: np.array(v) for k, v in tree_flatten(net.parameters())}
    nn.quantize(net)
    assert isinstance(net.layers[1], nn.QuantizedLinear)
    net.set_dtype(mx.bfloat16)
    for name, value in tree_flatten(net.parameters()):
        if "layers.1" not in name and "bias" not in name:
            assert np.array_equal(value, before[name]), name
    assert net.layers[0].bias.dtype == mx.bfloat16
    assert mx.isfinite(net(*inputs)).all()


def test_linear_of_plain_weights_follows_their_dtype(rng):
    w = mx.array(rng.standard_normal((5, 33)).astype(np.float32))
    layer = gg.nn.QuantLinear.from_packed(w, "f32")
    x, _ = activations((2, 33), mx.float32, rng)
    assert close(layer(x), x @ w.T)
    layer.set_dtype(mx.bfloat16)
    assert layer.qtype == "bf16"
    assert close(layer(x), x @ w.astype(mx.bfloat16).astype(mx.float32).T)


# From a file


@pytest.fixture
def file(rng, tmp_path):
    path = str(tmp_path / "m.gguf")
    writer = GGUFWriter(path, "llama")
    tensors = {
        "a.weight": (random_blocks("q4_k", 33, 512, rng), "Q4_K"),
        "a.bias": (rng.standard_normal(33).astype(np.float32), "F32"),
        "b.weight": (random_blocks("q5_0", 8, 96, rng), "Q5_0"),
        "c.weight": (rng.standard_normal((4, 33)).astype(np.float16), "F16"),
        "token_embd.weight": (random_blocks("q6_k", 9, 256, rng), "Q6_K"),
        "v.weight": (rng.standard_normal(8).astype(np.float32), "F32"),
    }
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gg.open(path)


def test_layers_of_a_file(file, rng):
    for name, shape, bias in (("a", (33, 512), True), ("b", (8, 96), False), ("c", (4, 33), False)):
        for key in (name, name + ".weight"):
            layer = gg.nn.QuantLinear.from_gguf(file, key)
            assert ("bias" in layer) == bias
            assert layer.qtype == file.tensors[name + ".weight"].qtype
            x, _ = activations((3, shape[1]), mx.float32, rng)
            w = dense(mx.view(mx.contiguous(layer.weight), mx.uint8), layer.qtype)
            y = x @ w.T + (file["a.bias"] if bias else 0)
            assert close(layer(x), y), key
    embed = gg.nn.QuantEmbedding.from_gguf(file, dtype=mx.float16)
    rows = dense(file["token_embd.weight"], "q6_k")
    assert mx.array_equal(embed(mx.array([8, 0])), rows[mx.array([8, 0])].astype(mx.float16))
    with pytest.raises(ValueError, match=r"\[QuantLinear.from_gguf\] Expected a matrix.*v\.weight"):
        gg.nn.QuantLinear.from_gguf(file, "v")
    with pytest.raises(KeyError, match="nothing"):
        gg.nn.QuantLinear.from_gguf(file, "nothing")
    # The layer keeps the file's mapping alive.
    del file
    assert mx.isfinite(layer(x)).all()
