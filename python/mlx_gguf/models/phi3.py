"""phi3: Phi-3, Phi-3.5 and Phi-4 mini."""

from __future__ import annotations

from typing import Any

from ..file import GGUFFile
from .base import LAYER, Architecture, Keys, common_config

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    fields = common_config(keys, file)
    fields["rope_scaling"] = None
    if LONG in file:
        # mlx-lm uses the long factors for prompts of any length.
        fields["rope_scaling"] = {
            "type": "longrope",
            "long_factor": file[LONG].tolist(),
            "short_factor": file[SHORT].tolist(),
        }
    rotated = keys.number("rope.dimension_count", fields["head_dim"])
    return {
        **fields,
        # A fraction that mlx-lm rounds down, as for qwen35.
        "partial_rotary_factor": (rotated + 0.5) / fields["head_dim"],
        "original_max_position_embeddings": keys.number(
            "rope.scaling.original_context_length", fields["max_position_embeddings"]
        ),
    }


ARCHITECTURE: Architecture = Architecture(
    name="phi3",
    module="phi3",
    config=config,
    layer={
        **LAYER,
        "attn_qkv": "self_attn.qkv_proj",
        # Gate and up in one, as in mlx-lm's class.
        "ffn_up": "mlp.gate_up_proj",
    },
    extras=frozenset({LONG, SHORT}),
)
