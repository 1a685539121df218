"""qwen3moe: Qwen3 mixtures of experts."""

from __future__ import annotations

from typing import Any

from ..file import GGUFFile
from .base import LAYER, Architecture, Keys, check_full_rope, common_config
from .experts import EXPERTS, expert_config, fuse_gate_up


def config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    fields = common_config(keys, file, dense=False)
    check_full_rope(keys, fields)
    return {**fields, **expert_config(keys, file)}


def finish(model: Any, keys: Keys, file: GGUFFile) -> None:
    from mlx_lm.models.rope_utils import initialize_rope

    args = model.args
    if args.rope_scaling:
        # mlx-lm's class takes the configuration and leaves it out.
        rope = initialize_rope(
            args.head_dim, args.rope_theta, False, args.rope_scaling, args.max_position_embeddings
        )
        for layer in model.layers:
            layer.self_attn.rope = rope
    fuse_gate_up(model, file)


ARCHITECTURE: Architecture = Architecture(
    name="qwen3moe",
    module="qwen3_moe",
    config=config,
    layer={**LAYER, **EXPERTS},
    finish=finish,
)
