"""qwen3: Qwen3, dense."""

from __future__ import annotations

from typing import Any

from ..file import GGUFFile
from .base import Architecture, Keys, check_full_rope, common_config


def config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    fields = common_config(keys, file)
    check_full_rope(keys, fields)
    return fields


ARCHITECTURE: Architecture = Architecture(name="qwen3", module="qwen3", config=config)
