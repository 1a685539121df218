"""gemma2: Gemma 2 language models.

mlx-lm's class attends to the whole text in every layer: beyond the model's window of 4,096 tokens
it differs from the original, by safetensors as by GGUF.
"""

from __future__ import annotations

from typing import Any

from ..file import GGUFFile
from .base import Architecture, Keys, check_full_rope, common_config
from .gemma3 import ARCHITECTURE as GEMMA3
from .gemma3 import add_one_once, less_one

# Layers of the 27B model, the one whose queries are not scaled by the head size.
_LAYERS_27B = 46


def config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    fields = common_config(keys, file)
    check_full_rope(keys, fields)
    if fields["rope_scaling"]:
        raise ValueError(
            f"[load] Expected gemma2 without rope.scaling. Received {fields['rope_scaling']}."
        )
    query_scale = fields["head_dim"]
    if fields["num_hidden_layers"] == _LAYERS_27B:
        query_scale = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        "query_pre_attn_scalar": query_scale,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


ARCHITECTURE: Architecture = Architecture(
    name="gemma2",
    module="gemma2",
    config=config,
    layer=GEMMA3.layer,
    transforms={"norm.weight": less_one},
    finish=lambda model, keys, file: add_one_once(model),
)
