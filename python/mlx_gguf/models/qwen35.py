"""qwen35 and qwen35moe: Qwen3.5, gated delta rule and full attention in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..file import GGUFFile
from .base import LAYER, NEXTN, OUTER, Architecture, Keys, common_config, rope_scaling
from .experts import EXPERTS, SHARED_EXPERT, expert_config, fuse_gate_up

LINEAR = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
del LINEAR["ffn_norm"]

# Layers with full attention may hold the three projections in one tensor.
FUSED_ATTENTION = {"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}

TRANSFORMS = {
    # The file has -exp(A_log).
    "linear_attn.A_log": lambda a: mx.log(-a.astype(mx.float32)),
    "linear_attn.conv1d.weight": lambda w: w[..., None],
}
# They make the decay, which is float32 anyway.
FLOAT32 = frozenset({"linear_attn.A_log", "linear_attn.dt_bias"})


def linear_layers(keys: Keys, layers: int) -> list[bool]:
    """For each layer whether it is a gated delta rule, not full attention."""
    flags = keys.get("attention.recurrent_layers")
    if flags is None:
        interval = keys.count("full_attention_interval", 4)
        return [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers:
        raise ValueError(
            f"[load] Expected attention.recurrent_layers to have a flag for each of {layers} "
            f"layers. Received {flags!r}."
        )
    return [bool(flag) for flag in flags[:layers]]


def config(keys: Keys, file: GGUFFile, *, dense: bool = True) -> dict[str, Any]:
    fields = common_config(keys, file, dense=dense)
    head_dim = fields["head_dim"]
    value_heads, key_heads = keys.count("ssm.time_step_rank"), keys.count("ssm.group_count")
    if value_heads % key_heads:
        raise ValueError(
            f"[load] Expected ssm.time_step_rank, the value heads, to be a multiple of "
            f"ssm.group_count, {key_heads}. Received {value_heads}."
        )
    state = keys.count("ssm.state_size")
    if keys.count("ssm.inner_size") != state * value_heads:
        raise ValueError(
            f"[load] Expected ssm.inner_size to be {value_heads} heads of ssm.state_size {state}. "
            f"Received {keys.count('ssm.inner_size')}."
        )
    interval = keys.count("full_attention_interval", 4)
    rotated = keys.number("rope.dimension_count", head_dim // 4)
    scaling = rope_scaling(keys) or {"rope_type": "default"}
    return {
        **fields,
        "linear_num_value_heads": value_heads,
        "linear_num_key_heads": key_heads,
        "linear_key_head_dim": state,
        "linear_value_head_dim": state,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "full_attention_interval": interval,
        # mlx-lm takes the rotated part as a fraction and rounds down: the half keeps
        # it from rounding below the file's whole number.
        "rope_parameters": {
            **scaling,
            "rope_theta": keys.positive("rope.freq_base"),
            "partial_rotary_factor": (rotated + 0.5) / head_dim,
        },
    }


def moe_config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    return {
        **config(keys, file, dense=False),
        **expert_config(keys, file),
        "shared_expert_intermediate_size": file.tensors["blk.0.ffn_up_shexp.weight"].shape[0],
    }


def set_layer_kinds(model: Any, keys: Keys) -> None:
    """Put each layer's kind where the file wants it: mlx-lm only knows a fixed interval."""
    from mlx_lm.models.qwen3_5 import DecoderLayer

    text = model.model
    alternate = replace(model.language_model.args, full_attention_interval=2)
    for i, linear in enumerate(linear_layers(keys, len(text.layers))):
        if text.layers[i].is_linear != linear:
            # The index only decides the kind: of every two, the second has full attention.
            text.layers[i] = DecoderLayer(alternate, 0 if linear else 1)
    kinds = [layer.is_linear for layer in text.layers]
    # The layers whose caches the two masks are made from.
    text.ssm_idx = kinds.index(True) if True in kinds else None
    text.fa_idx = kinds.index(False) if False in kinds else None


class TilingConv1d(nn.Conv1d):
    """The convolution over [q, k, v] that also repeats the heads of q and k.

    llama.cpp's converter stores value heads so that head h goes with key head
    h % key_heads, mlx-lm's recurrence takes key head h // (value_heads / key_heads).
    With q and k tiled to as many heads as v has, both say h: then every tensor of
    the layer can stay as it lies in the file.
    """

    def __init__(self, channels: int, kernel: int, key_heads: int, repeats: int, head_dim: int):
        super().__init__(channels, channels, kernel, groups=channels, bias=False)
        self.key_heads, self.repeats = key_heads, repeats
        self._head_dim = head_dim
        heads = list(range(channels // head_dim))
        q, k, v = heads[:key_heads], heads[key_heads : 2 * key_heads], heads[2 * key_heads :]
        self._order = mx.array(q * repeats + k * repeats + v)

    def __call__(self, x: mx.array) -> mx.array:
        heads = mx.unflatten(super().__call__(x), -1, (-1, self._head_dim))
        return mx.take(heads, self._order, axis=-2).flatten(-2)


def tile_key_heads(layer: Any) -> None:
    """Make a mlx-lm GatedDeltaNet take the file's order of value heads."""
    repeats = layer.num_v_heads // layer.num_k_heads
    if repeats == 1:
        return
    layer.conv1d = TilingConv1d(
        layer.conv_dim, layer.conv_kernel_size, layer.num_k_heads, repeats, layer.head_k_dim
    )
    # What comes out of the convolution; conv_dim still is what goes in.
    layer.num_k_heads = layer.num_v_heads
    layer.key_dim = layer.value_dim


def finish(model: Any, keys: Keys, file: GGUFFile) -> None:
    set_layer_kinds(model, keys)
    for layer in model.layers:
        if layer.is_linear:
            tile_key_heads(layer.linear_attn)
    fuse_gate_up(model, file)


_COMMON: dict[str, Any] = {
    "outer": OUTER,
    "otherwise": FUSED_ATTENTION,
    "transforms": TRANSFORMS,
    "float32": FLOAT32,
    "draft": NEXTN,
    "finish": finish,
    "prefix": "language_model.",
}

DENSE: Architecture = Architecture(
    name="qwen35", module="qwen3_5", config=config, layer=LINEAR, **_COMMON
)
MOE: Architecture = Architecture(
    name="qwen35moe",
    module="qwen3_5_moe",
    config=moe_config,
    layer={**LINEAR, **EXPERTS, **SHARED_EXPERT},
    **_COMMON,
)
