"""Mixtures of experts: packed, each projection of its own type, few or many tokens at once."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

import mlx_gguf as gg
from blocks import dequantize64, random_blocks
from mlx_gguf import _ext
from mlx_gguf.models.experts import FusedSwitchGLU
from mlx_gguf.nn import QuantSwitchLinear
from reference import hybrid, variants

EXPERTS, HIDDEN, WIDTH = 6, 256, 96


def packed(qtype, rows, K, seed):
    rng = np.random.default_rng(seed)
    blocks = random_blocks(qtype, EXPERTS * rows, K, rng, size=(0.5 * K**-0.5, 2 * K**-0.5))
    return blocks.reshape(EXPERTS, rows, -1)


def layer(blocks, qtype):
    return QuantSwitchLinear.from_packed(mx.array(blocks), qtype)


def choices(tokens, used, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(EXPERTS)[:used] for _ in range(tokens)])


def silu(x):
    return x / (1 + np.exp(-x))


def expected(x, chosen, gate, up, down):
    out = np.zeros((*chosen.shape, HIDDEN))
    for t, experts in enumerate(chosen):
        for i, e in enumerate(experts):
            out[t, i] = down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))
    return out


@pytest.mark.parametrize("tokens", [1, 2, 21, 40], ids=lambda t: f"{t} tokens")
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_few_and_many_tokens_equal_the_dense_product(tokens, fused):
    """Below 64 rows mlx-lm takes the tokens as they come, from there on sorted by expert."""
    gate, up = packed("q4_k", WIDTH, HIDDEN, 1), packed("q4_k", WIDTH, HIDDEN, 2)
    down = packed("q5_1", HIDDEN, WIDTH, 3)
    if fused:
        module = FusedSwitchGLU(HIDDEN, WIDTH, EXPERTS)
        module.gate_up_proj = layer(np.concatenate([gate, up], axis=1), "q4_k")
    else:
        module = SwitchGLU(HIDDEN, WIDTH, EXPERTS)
        module.gate_proj, module.up_proj = layer(gate, "q4_k"), layer(up, "q4_k")
    module.down_proj = layer(down, "q5_1")
    x = np.random.default_rng(4).normal(size=(tokens, HIDDEN)).astype(np.float32)
    chosen = choices(tokens, 3)
    want = expected(
        x.astype(np.float64),
        chosen,
        *(dequantize64(w, q) for w, q in ((gate, "q4_k"), (up, "q4_k"), (down, "q5_1"))),
    )
    got = np.array(module(mx.array(x)[None], mx.array(chosen)[None])[0])
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("family", "name", "calls"),
    [(hybrid, "qwen35moe", 3), (variants, "qwen3moe", 3), (variants, "qwen3moe-yarn", 2)],
    ids=["qwen35moe", "qwen3moe", "fused"],
)
def test_one_product_for_all_experts(family, name, calls, tmp_path, monkeypatch):
    family.write_model(name, tmp_path / "m.gguf")
    model, _ = gg.load(tmp_path / "m.gguf", dtype=mx.float32)
    seen = []

    def counted(*args, **kwargs):
        seen.append(kwargs["sorted_indices"])
        return gather(*args, **kwargs)

    gather = _ext.gather_qmm
    monkeypatch.setattr(_ext, "gather_qmm", counted)
    mx.eval(model(mx.array([[5]])))
    assert seen == [False] * calls * len(model.layers)
    seen.clear()
    mx.eval(model(mx.arange(40)[None]))
    assert seen == [True] * calls * len(model.layers)


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
def test_each_projection_keeps_its_type(name, tmp_path):
    hybrid.write_model(name, tmp_path / "m.gguf")
    file = gg.open(tmp_path / "m.gguf")
    model, _ = gg.load(tmp_path / "m.gguf", dtype=mx.float32)
    differ = 0
    for i, block in enumerate(model.layers):
        experts = block.mlp.switch_mlp
        types = []
        for stem in ("gate", "up", "down"):
            part = experts[f"{stem}_proj"]
            assert isinstance(part, QuantSwitchLinear)
            info = file.tensors[f"blk.{i}.ffn_{stem}_exps.weight"]
            assert part.qtype == info.qtype
            assert (part.num_experts, part.output_dims, part.input_dims) == info.shape
            types.append(part.qtype)
        differ += len(set(types)) > 1
    assert differ > len(model.layers) // 2


@pytest.mark.parametrize("name", ["qwen35moe", "qwen35moe-r3"])
def test_a_prompt_at_once_equals_token_by_token(name, tmp_path):
    hybrid.write_model(name, tmp_path / "m.gguf")
    model, _ = gg.load(tmp_path / "m.gguf", dtype=mx.float32)
    tokens = mx.arange(10, 60)[None]
    at_once = np.array(model(tokens)[0])
    cache = model.make_cache()
    steps = [model(tokens[:, i : i + 1], cache=cache)[0, 0] for i in range(tokens.size)]
    np.testing.assert_allclose(np.array(mx.stack(steps)), at_once, atol=2e-3)
