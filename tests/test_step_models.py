"""Models that take steps and models that do not, and when the layers are called instead."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import rope_utils
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

import step_support
from mlx_gguf import _ext, step
from step_support import build, error, feed, ids_of, stepping

steps = step_support.steps  # the fixture


# When the layers are called


def test_only_single_tokens_behind_others(steps):
    model = stepping("llama")
    cache = make_prompt_cache(model)
    model(mx.array([[1]]))
    model(mx.array([[1]]), cache=cache)
    assert steps == []
    model(mx.array([[2, 3]]), cache=cache)
    model(mx.array([[2], [3]]), cache=make_prompt_cache(model))
    assert steps == []
    model(mx.array([[1]]), cache=cache)
    assert steps == [3]


def test_other_caches(steps):
    model, plain = stepping("llama"), build("llama")
    ids = ids_of(8)
    want = feed(plain, make_prompt_cache(plain), ids, [8])
    rotating = [RotatingKVCache(max_size=64) for _ in range(3)]
    assert error(feed(model, rotating, ids, [4] + [1] * 4), want) < 1e-5
    assert steps == []
    cache = make_prompt_cache(model)
    feed(model, cache, ids, [4] + [1] * 4)
    steps.clear()
    quantized = [c.to_quantized(group_size=32, bits=8) for c in cache]
    assert quantized[0].offset == 8
    model(mx.array([[1]]), cache=quantized)
    uneven = make_prompt_cache(model)
    feed(model, uneven, ids, [4])
    uneven[1].trim(1)
    model(mx.array([[1]]), cache=uneven)
    assert steps == []


CHANGES = {
    "weight": lambda m, o: setattr(m.layers[1].mlp.down_proj, "weight", o.mlp.down_proj.weight),
    "bias": lambda m, o: setattr(m.layers[1].self_attn.q_proj, "bias", o.self_attn.q_proj.bias),
    "norm": lambda m, o: setattr(m.layers[1].input_layernorm, "weight", o.input_layernorm.weight),
    "module": lambda m, o: setattr(m.layers[1].self_attn, "k_proj", o.self_attn.k_proj),
    "layer": lambda m, o: m.model.layers.__setitem__(1, o),
    "later bias": lambda m, o: setattr(
        m.layers[1].self_attn.o_proj, "bias", o.input_layernorm.weight
    ),
    "fewer layers": lambda m, o: m.model.layers.pop(),
    "update": lambda m, o: m.layers[1].update({"mlp": {"up_proj": o.mlp.up_proj.parameters()}}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_models(what, steps):
    models = stepping("qwen2"), build("qwen2")
    for model in models:
        CHANGES[what](model, build("qwen2").layers[2])
    ids = ids_of(8)
    logits = [feed(m, make_prompt_cache(m), ids, [4] + [1] * 4) for m in models]
    assert error(*logits) < 1e-5
    assert steps == []


RULES = {
    "gates": lambda r, o: setattr(r.in_proj_b, "weight", o.in_proj_b.weight),
    "taps": lambda r, o: setattr(r.conv1d, "weight", o.conv1d.weight),
    "norm": lambda r, o: setattr(r, "norm", o.norm),
    "decay": lambda r, o: setattr(r, "A_log", o.A_log),
    "projection": lambda r, o: setattr(r.in_proj_z, "weight", o.in_proj_z.weight),
}


@pytest.mark.parametrize("what", RULES)
def test_changed_delta_rules(what, steps):
    models = stepping("qwen3.5"), build("qwen3.5")
    for model in models:
        RULES[what](model.layers[0].linear_attn, build("qwen3.5").layers[2].linear_attn)
    ids = ids_of(8)
    logits = [feed(m, make_prompt_cache(m), ids, [4] + [1] * 4) for m in models]
    assert error(*logits) < 1e-5
    assert steps == []


TOLD = {
    "top_k": lambda layer: setattr(layer.mlp, "top_k", 1),
    "norm_topk_prob": lambda layer: setattr(layer.mlp, "norm_topk_prob", False),
    "eps": lambda layer: setattr(layer.input_layernorm, "eps", 0.5),
    "scale": lambda layer: setattr(layer.self_attn, "scale", 0.5),
    "rope": lambda layer: setattr(layer.self_attn, "rope", nn.RoPE(16, base=7.0)),
}


@pytest.mark.parametrize("what", TOLD)
def test_changed_attributes(what, steps):
    models = stepping("qwen3.5moe"), build("qwen3.5moe")
    for model in models:
        TOLD[what](model.layers[1])
    ids = ids_of(8)
    logits = [feed(m, make_prompt_cache(m), ids, [4] + [1] * 4) for m in models]
    assert error(*logits) < 1e-5
    assert steps == []


def test_weights_with_gaps(steps):
    models = build("qwen3.5"), build("qwen3.5")
    for model in models:
        model.layers[0].input_layernorm.weight = mx.broadcast_to(mx.array(0.7), (256,))
        norm = model.layers[1].post_attention_layernorm
        norm.weight = mx.stack([norm.weight, norm.weight], -1)[:, 0]
        rule = model.layers[0].linear_attn
        rule.A_log = mx.broadcast_to(mx.array(0.3), (8,))
    assert step.install(models[0])
    ids = ids_of(8)
    logits = [feed(m, make_prompt_cache(m), ids, [4] + [1] * 4) for m in models]
    assert error(*logits) < 1e-5
    assert len(steps) == 4


def test_another_kind_of_shared_expert():
    model = build("qwen3.5moe")
    shared = model.layers[0].mlp.shared_expert
    shared.__class__ = type("Other", (type(shared),), {})
    assert not step.install(model)


def test_padded_sequences_of_delta_rules(steps):
    model = stepping("qwen3.5")
    cache = make_prompt_cache(model)
    feed(model, cache, ids_of(6), [4, 1, 1])
    steps.clear()
    for c in cache[::2]:
        c.lengths = mx.array([1])
    model(mx.array([[1]]), cache=cache)
    assert steps == []


@pytest.mark.parametrize("qtype", ["f16", "f32", "bf16", "q8_0"])
def test_gates_of_other_types(qtype, steps):
    """Those of files may be plain numbers."""
    types = {"in_proj_a": qtype, "in_proj_b": qtype}
    models = [make("qwen3.5-tiled", types=types) for make in (stepping, build)]
    ids = ids_of(8)
    logits = [feed(m, make_prompt_cache(m), ids, [4] + [1] * 4) for m in models]
    assert error(*logits) < 1e-5
    assert steps == [4, 5, 6, 7]


def test_groups_that_are_no_run(steps):
    """q and v are one product, for k is of another type."""
    models = [make("llama", types={"k_proj": "q6_k"}) for make in (stepping, build)]
    ids = ids_of(8)
    logits = [feed(m, make_prompt_cache(m), ids, [4] + [1] * 4) for m in models]
    assert error(*logits) < 1e-5
    assert steps == [4, 5, 6, 7]


def test_without_caches_or_without_inputs(steps):
    model, plain = stepping("llama"), build("llama")
    token = mx.array([[3]])
    for cache in (None, [None] * 3):
        assert error(model(token, cache=cache), plain(token, cache=cache)) < 1e-5
    x = plain.model.embed_tokens(token)
    y, expected = (m.model(None, None, input_embeddings=x) for m in (model, plain))
    assert error(y, expected) < 1e-5
    assert steps == []


def test_adapters(steps):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    models = stepping("llama"), build("llama")
    for model in models:
        mx.random.seed(1)
        linear_to_lora_layers(model, 2, {"rank": 4, "scale": 20.0, "dropout": 0.0})
        layer = model.layers[2].self_attn.q_proj
        layer.lora_b = mx.random.normal(layer.lora_b.shape)
    ids = ids_of(8)
    logits = [feed(m, make_prompt_cache(m), ids, [4] + [1] * 4) for m in models]
    assert error(*logits) < 1e-4
    assert steps == []


def test_transformations(steps):
    models = stepping("llama"), build("llama")
    x = mx.random.normal((1, 1, 256))
    grads = []
    for model in models:
        cache = make_prompt_cache(model)
        feed(model, cache, ids_of(6), [4, 1, 1])
        steps.clear()

        def loss(x, model=model, cache=cache):
            past = copy.deepcopy(cache)
            return model.model(mx.array([[1]]), past, input_embeddings=x).square().sum()

        grads.append(mx.grad(loss)(x))
        assert mx.allclose(mx.compile(loss)(x), loss(x), rtol=1e-4)
    assert error(*grads) < 1e-4
    # Only what was not transformed; the plain model has none.
    assert steps == []


# What it is put into


def test_models_without_such_an_operation():
    model = build("llama")
    model.layers[1].self_attn.o_proj.bias = mx.zeros((256,))
    assert not step.install(model)
    model = build("llama")
    model.layers[2].post_attention_layernorm.eps = 0.5
    assert not step.install(model)
    model = build("llama")
    model.layers[0].self_attn.rope = rope_utils.DynamicNTKScalingRoPE(64, 512, False, 1e4, 2.0)
    assert not step.install(model)
    model = build("llama")
    model.layers[0].mlp = nn.Sequential()
    assert not step.install(model)
    model = build("llama", types={"v_proj": "f16"})
    assert not step.install(model)
    assert not step.install(nn.Linear(2, 2))
    model = build("qwen3.5")
    model.layers[2].linear_attn.norm.eps = 0.5
    assert not step.install(model)
    model = build("qwen3.5")
    model.layers[2].linear_attn.in_proj_a.bias = mx.zeros((8,))
    assert not step.install(model)
    model = stepping("llama")
    assert not step.install(model)  # a second time


def test_it_keeps_parameters_and_names():
    model, plain = stepping("llama"), build("llama")
    assert repr(model) == repr(plain)
    assert model.model._stack.dtype == mx.float32


STACK = {
    "inner": 512,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "gated": False,
    "eps": 1e-5,
    "scale": 0.125,
    "traditional": False,
    "gain": 1.0,
    "speeds": [1.0] * 32,
    "delta": (0, 0, 0, 0, False),
    "experts": (0, 0, 0, False),
}


def test_stacks_of_the_wrong_sizes():
    norm = mx.ones((256,))
    for change, text in (
        ({"kv_heads": 3}, r"\[Stack\] Expected sizes and heads in groups. Received"),
        ({"inner": -1}, r"hidden 256, inner -1, heads 4"),
        ({"speeds": []}, r"Expected 1 to 32 rotated pairs. Received 0\."),
        ({"speeds": [1.0] * 33}, r"Expected 1 to 32 rotated pairs. Received 33\."),
    ):
        with pytest.raises(ValueError, match=text):
            _ext.Stack(norm, **{**STACK, **change})
    with pytest.raises(ValueError, match=r"Expected float16, bfloat16 or float32. Received int32"):
        _ext.Stack(mx.ones((256,), mx.int32), **STACK)
    with pytest.raises(ValueError, match=r"Expected the last norm of shape"):
        _ext.Stack(mx.ones((2, 256)), **STACK)


def test_layers_of_the_wrong_shapes():
    norm = mx.ones((256,))

    def part(N: int, K: int, qtype: str = "q4_k", bias: mx.array | None = None) -> Any:
        return mx.zeros((N, _ext.find_format(qtype).row_bytes(K)), mx.uint8), qtype, bias

    right: dict[str, Any] = {
        "input_norm": norm,
        "in_": [part(512, 256)],
        "q_norm": None,
        "k_norm": mx.ones((64,)),
        "delta": None,
        "output": part(256, 256),
        "mlp_norm": norm,
        "gate_up": [part(512, 256), part(512, 256, "q6_k")],
        "down": part(256, 512),
        "experts": None,
    }
    stack = _ext.Stack(norm, **STACK)
    stack.add_layer(**right)
    for change, text in (
        ({"mlp_norm": norm[:8]}, r"Expected mlp_norm of shape \(256\) and dtype float32. Rec"),
        ({"q_norm": norm}, r"Expected the norm of a head of shape \(64\)"),
        ({"in_": [part(256, 256)]}, r"Expected q, k and v to have 512 rows. Received 256"),
        ({"in_": [part(512, 512)]}, r"Expected q, k and v to be packed rows of 256 weights"),
        ({"in_": [part(512, 256, bias=norm)]}, r"Expected a bias of shape \(512\)"),
        ({"down": part(256, 256)}, r"Expected down to be packed rows of 512 weights. Received q4"),
        ({"output": (mx.zeros((256, 256)), "f32", None)}, r"Expected output to be packed rows"),
        ({"gate_up": [part(512, 256)]}, r"Expected gate and up to have 1024 rows. Received 512"),
        ({"down": (part(256, 512)[0], "q9_z", None)}, r"\[Stack\] Expected"),
    ):
        with pytest.raises(ValueError, match=text):
            stack.add_layer(**{**right, **change})


# Its kernels


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_compile(architecture):
    root = Path(__file__).parent.parent
    sys.path.insert(0, str(root / "benchmarks"))
    import cuda_driver

    try:
        cuda_driver.library()
    except OSError as missing:
        pytest.skip(str(missing))
    functions = [
        function
        for dtype in ("half_t", "bfloat_t", "float")
        for function in (
            f"rms_norm<{dtype}>",
            f"gated<{dtype}>",
            f"gated_delta<{dtype}, 128>",
            f"gated_delta<{dtype}, 96>",
            f"delta_step<{dtype}, 128>",
            f"delta_step<{dtype}, 32>",
            f"route<{dtype}>",
            f"combine<{dtype}>",
            f"attend<{dtype}, 128, 4, 8, 8>",
            f"attend<{dtype}, 80, 1, 8, 8>",
            f"attend<{dtype}, 256, 4, 16, 8>",
        )
    ]
    source = cuda_driver.flatten(root / "cuda" / "kernels.cu")
    code, names = cuda_driver.compile(source, functions, architecture)
    assert code[:4] == b"\x7fELF"
    assert all(name in code for name in names)
