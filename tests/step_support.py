"""Tiny models of the architectures whose layers a step takes in one operation."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models import llama, qwen2, qwen3, qwen3_5, qwen3_moe
from mlx_lm.models.cache import KVCache
from mlx_lm.models.switch_layers import SwitchLinear

from blocks import random_blocks
from mlx_gguf import _ext, step
from mlx_gguf.fused import fuse
from mlx_gguf.models.experts import FusedSwitchGLU
from mlx_gguf.models.qwen35 import tile_key_heads
from mlx_gguf.nn import QuantEmbedding, QuantLinear, QuantSwitchLinear

MODULES = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_moe": qwen3_moe,
}
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rope_theta": 3e3,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
HYBRID = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {"type": "default", "rope_theta": 3e3, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
# fmt: off
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-traditional": ("llama", {"rope_traditional": True}),
    "llama-bias": ("qwen2", {"num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama-3.1": ("llama", {"rope_scaling": LLAMA3, "num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "qwen2": ("qwen2", {"num_attention_heads": 8, "head_dim": 32}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide": ("qwen3", {"head_dim": 128, "num_key_value_heads": 1}),
    "qwen3-96": ("qwen3", {"head_dim": 96}),
    "qwen3-80": ("qwen3", {"head_dim": 80, "num_attention_heads": 6}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": YARN}),
    "qwen3.5": ("qwen3_5", HYBRID),
    "qwen3.5-tiled": ("qwen3_5", HYBRID),
    "qwen3.5-wide": ("qwen3_5", {**HYBRID, "head_dim": 256, "linear_num_key_heads": 1,
                                 "linear_num_value_heads": 2, "linear_key_head_dim": 128,
                                 "linear_value_head_dim": 128}),
    "qwen3.5-96": ("qwen3_5", {**HYBRID, "full_attention_interval": 3, "linear_num_key_heads": 8,
                               "linear_key_head_dim": 96, "linear_value_head_dim": 96,
                               "linear_conv_kernel_dim": 3}),
    "qwen3moe": ("qwen3_moe", EXPERTS),
    "qwen3moe-some": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1], "num_experts": 40,
                                    "norm_topk_prob": False}),
    "qwen3.5moe": ("qwen3_5", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 512}),
    "qwen3.5moe-fused": ("qwen3_5", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 256,
                                     "num_experts": 33, "num_experts_per_tok": 1}),
}
# fmt: on
TYPES = {"v_proj": "q6_k", "down_proj": "q5_k", "o_proj": "q8_0"}  # the others q4_k


def build(variant: str, dtype: mx.Dtype = mx.float32, types: dict[str, str] | None = None) -> Any:
    """A random model, always with the same numbers; nothing of it is fused."""
    module, overrides = VARIANTS[variant]
    rng = np.random.default_rng(7)
    args = {"model_type": module, **SIZES, **overrides}
    model = MODULES[module].Model(MODULES[module].ModelArgs.from_dict(args))

    def numbers(low: float, high: float, *shape: int) -> mx.array:
        return mx.array(rng.uniform(low, high, shape).astype(np.float32)).astype(dtype)

    for layer in model.modules():
        if variant.endswith("tiled") and isinstance(layer, qwen3_5.GatedDeltaNet):
            tile_key_heads(layer)
        elif variant.endswith("fused") and hasattr(layer, "switch_mlp"):
            down = layer.switch_mlp.down_proj
            layer.switch_mlp = FusedSwitchGLU(down.output_dims, down.input_dims, down.num_experts)
    made: list[tuple[str, nn.Module]] = []
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.RMSNorm, qwen3_5.RMSNormGated)):
            layer.weight = numbers(0.6, 1.4, *layer.weight.shape)
        elif isinstance(layer, qwen3_5.GatedDeltaNet):
            layer.conv1d.weight = numbers(-1, 1, *layer.conv1d.weight.shape)
            for key in ("A_log", "dt_bias"):
                layer[key] = numbers(-1, 1, *layer[key].shape).astype(mx.float32)
        elif isinstance(layer, (nn.Linear, nn.Embedding, SwitchLinear)):
            *E, N, K = layer.weight.shape
            qtype = (TYPES if types is None else types).get(name.rpartition(".")[2], "q4_k")
            size = (0.7 * K**-0.5, 1.4 * K**-0.5)
            packed = mx.array(random_blocks(qtype, math.prod([*E, N]), K, rng, size=size))
            if isinstance(layer, SwitchLinear):
                packed = packed.reshape(*E, N, -1)
                made.append((name, QuantSwitchLinear.from_packed(packed, qtype)))
            elif isinstance(layer, nn.Embedding):
                made.append((name, QuantEmbedding.from_packed(packed, qtype, dtype)))
            else:
                bias = numbers(-1, 1, N) if "bias" in layer else None
                made.append((name, QuantLinear.from_packed(packed, qtype, bias)))
    model.update_modules(tree_unflatten(made))
    model.eval()
    mx.eval(model.parameters())
    return model


def stepping(variant: str, dtype: mx.Dtype = mx.float32, **options: Any) -> Any:
    model = build(variant, dtype, **options)
    fuse(model)
    assert step.install(model)
    return model


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """The positions of all steps from now on."""
    made: list[int] = []
    original = _ext.step

    def counted(history, x, position, last):
        y = original(history, x, position, last)
        if y is not None:
            made.append(position)
        return y

    monkeypatch.setattr(_ext, "step", counted)
    return made


def feed(model: Any, cache: Any, ids: list[int], sizes: list[int]) -> mx.array:
    """The logits of all ids, given to the model in pieces."""
    out, at = [], 0
    for size in sizes:
        out.append(model(mx.array([ids[at : at + size]]), cache=cache))
        mx.eval(out[-1])
        at += size
    return mx.concatenate(out, axis=1).astype(mx.float32)


def ids_of(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(3).integers(0, 128, count)]


def error(got: mx.array, want: mx.array) -> float:
    return (mx.linalg.norm((got - want).flatten()) / mx.linalg.norm(want.flatten())).item()


def in_caches(caches: list[Any]) -> mx.array:
    """All that caches hold."""
    held: list[mx.array] = []
    for c in caches:
        if isinstance(c, KVCache):
            held += [c.keys[..., : c.offset, :], c.values[..., : c.offset, :]]
        else:
            held += c.cache
    return mx.concatenate([a.astype(mx.float32).flatten() for a in held])
