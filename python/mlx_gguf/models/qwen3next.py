"""qwen3next: Qwen3-Next, by the classes of Qwen3.5, whose projections are split as in the file."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..file import GGUFFile
from .base import Architecture, Keys
from .experts import EXPERTS, SHARED_EXPERT, fuse_gate_up
from .qwen35 import FLOAT32, FUSED_ATTENTION, LINEAR, TRANSFORMS, moe_config, set_layer_kinds


def beta_then_alpha(model: Any, rows: mx.array) -> mx.array:
    """Rows of ``ssm_ba``: for each key head the betas of its value heads, then the alphas."""
    args = model.language_model.args
    repeats = args.linear_num_value_heads // args.linear_num_key_heads
    by_head = rows.reshape(-1, 2, repeats, rows.shape[-1])
    return by_head.swapaxes(0, 1).reshape(rows.shape)


def qkv_then_z(model: Any, rows: mx.array) -> mx.array:
    """Rows of ``ssm_in``, of older files: for each key head its q, k, v and z."""
    args = model.language_model.args
    size = args.linear_key_head_dim
    values = size * args.linear_num_value_heads // args.linear_num_key_heads
    by_head = rows.reshape(args.linear_num_key_heads, -1, rows.shape[-1])
    parts = mx.split(by_head, [size, 2 * size, 2 * size + values], axis=1)
    return mx.concatenate([part.reshape(-1, rows.shape[-1]) for part in parts])


def finish(model: Any, keys: Keys, file: GGUFFile) -> None:
    # Value heads are in mlx-lm's order here, not tiled as in qwen35 files.
    set_layer_kinds(model, keys)
    fuse_gate_up(model, file)


ARCHITECTURE: Architecture = Architecture(
    name="qwen3next",
    module="qwen3_5_moe",
    config=moe_config,
    layer={
        **LINEAR,
        **EXPERTS,
        **SHARED_EXPERT,
        "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        "ssm_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    },
    otherwise=FUSED_ATTENTION,
    rows={"ssm_ba": beta_then_alpha, "ssm_in": qkv_then_z},
    transforms=TRANSFORMS,
    float32=FLOAT32,
    finish=finish,
    prefix="language_model.",
)
