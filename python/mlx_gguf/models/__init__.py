"""Architectures: how the tensors of a GGUF file become parameters of mlx-lm's models.

One file per family, each with an ``ARCHITECTURE`` or one for each of its names.
"""

from __future__ import annotations

from . import (
    gemma2,
    gemma3,
    granite,
    llama,
    phi3,
    qwen2,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen35,
)
from .base import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        gemma2.ARCHITECTURE,
        gemma3.ARCHITECTURE,
        granite.ARCHITECTURE,
        llama.ARCHITECTURE,
        phi3.ARCHITECTURE,
        qwen2.ARCHITECTURE,
        qwen3.ARCHITECTURE,
        qwen35.DENSE,
        qwen35.MOE,
        qwen3moe.ARCHITECTURE,
        qwen3next.ARCHITECTURE,
    )
}

# Files that hold part of a model, by their architecture.
NOT_LANGUAGE_MODELS = {
    "clip": "a vision or audio projector (mmproj), which goes with a language model's file",
}


def find_architecture(name: object, path: str) -> Architecture:
    """Return the architecture of that name, or raise ValueError that names the file."""
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    what = NOT_LANGUAGE_MODELS.get(str(name))
    if what:
        raise ValueError(
            f"[load] Expected a language model in {path!r}. Received architecture {name!r}, {what}."
        )
    raise ValueError(
        f"[load] Expected an architecture of {', '.join(sorted(ARCHITECTURES))}. Received "
        f"{name!r} in {path!r}."
    )
