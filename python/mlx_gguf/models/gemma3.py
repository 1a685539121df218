"""gemma3: Gemma 3 language models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..file import GGUFFile
from .base import LAYER, Architecture, Keys, common_config

# Layers of the 27B model, the one whose queries are not scaled by the head size.
_LAYERS_27B = 62


def sliding_window_pattern(keys: Keys) -> int:
    """Every how many layers one attends to everything; older files leave it out."""
    value = keys.get("attention.sliding_window_pattern", 6)
    if not isinstance(value, list):
        return keys.count("attention.sliding_window_pattern", 6)
    # One flag a layer, true for a window.
    period = value.index(False) + 1 if False in value else len(value) + 1
    if any(flag != ((i + 1) % period != 0) for i, flag in enumerate(map(bool, value))):
        raise ValueError(
            "[load] Expected windowed layers with every n-th layer global. Received "
            f"attention.sliding_window_pattern {value}."
        )
    return period


def config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    fields = common_config(keys, file)
    query_scale = fields["head_dim"]
    if fields["num_hidden_layers"] == _LAYERS_27B:
        query_scale = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        "rope_theta": keys.positive("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.positive("rope.freq_base_swa", 1e4),
        "query_pre_attn_scalar": query_scale,
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": sliding_window_pattern(keys),
    }


def less_one(weight: mx.array) -> mx.array:
    """Undo the converter's 1 + w: mlx-lm's norm adds the one itself."""
    return weight.astype(mx.float32) - 1


class PlusOneNorm(nn.Module):
    """mlx-lm's norm of Gemma, which adds 1 to its weight; here once for every weight.

    Two graph nodes less at each of a token's four norms a layer.
    """

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        if getattr(self, "_of", None) is not self.weight:
            self._of, self._scale = self.weight, 1.0 + self.weight
        return mx.fast.rms_norm(x, self._scale, self.eps)


def add_one_once(model: Any) -> None:
    """Give the model's norms the class above."""
    for module in model.modules():
        if type(module).__name__ == "RMSNorm":
            module.__class__ = PlusOneNorm


def finish(model: Any, keys: Keys, file: GGUFFile) -> None:
    add_one_once(model)
    # mlx-lm decides this when it loads safetensors.
    if "output.weight" not in file:
        model.tie_word_embeddings = True
        model.pop("lm_head")


ARCHITECTURE: Architecture = Architecture(
    name="gemma3",
    module="gemma3_text",
    config=config,
    layer={
        **LAYER,
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
    },
    transforms={"norm.weight": less_one},
    finish=finish,
)
