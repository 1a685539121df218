"""granite: IBM Granite 3 and 4, dense."""

from __future__ import annotations

from typing import Any

from ..file import GGUFFile
from .base import Architecture, Keys, check_full_rope, common_config


def config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    fields = common_config(keys, file)
    check_full_rope(keys, fields)
    if not keys.get("rope.scaling.finetuned", True):
        raise ValueError(
            "[load] Expected a granite model with rotary positions. Received one without, by "
            "rope.scaling.finetuned."
        )
    return {
        **fields,
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_bias": "blk.0.ffn_up.bias" in file,
        "attention_multiplier": keys.number("attention.scale", fields["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def finish(model: Any, keys: Keys, file: GGUFFile) -> None:
    from mlx_lm.models.rope_utils import initialize_rope

    # Rows of q and k lie in pairs, as in llama files; mlx-lm's class has no option for it.
    args = model.args
    for layer in model.layers:
        attention = layer.self_attn
        attention.rope = initialize_rope(
            attention.head_dim,
            args.rope_theta,
            True,
            args.rope_scaling,
            args.max_position_embeddings,
        )


ARCHITECTURE: Architecture = Architecture(
    name="granite", module="granite", config=config, finish=finish
)
