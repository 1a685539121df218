"""qwen2: Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from typing import Any

from ..file import GGUFFile
from .base import Architecture, Keys, check_full_rope, common_config


def config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    fields = common_config(keys, file)
    check_full_rope(keys, fields)
    if fields["head_dim"] * fields["num_attention_heads"] != fields["hidden_size"]:
        raise ValueError(
            "[load] Expected qwen2 heads to split the hidden size evenly. Received "
            f"{fields['num_attention_heads']} heads of {fields['head_dim']} in "
            f"{fields['hidden_size']}."
        )
    return fields


ARCHITECTURE: Architecture = Architecture(name="qwen2", module="qwen2", config=config)
