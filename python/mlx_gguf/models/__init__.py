"""Architectures: how the tensors of a GGUF file become parameters of mlx-lm's models.

One file per architecture, each with an ``ARCHITECTURE``.
"""

from __future__ import annotations

from . import gemma3, llama, qwen2, qwen3
from .base import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        gemma3.ARCHITECTURE,
        llama.ARCHITECTURE,
        qwen2.ARCHITECTURE,
        qwen3.ARCHITECTURE,
    )
}

# Files that hold part of a model, by their architecture.
NOT_LANGUAGE_MODELS = {
    "clip": "a vision or audio projector (mmproj), which goes with a language model's file",
}


def find_architecture(name: str, path: str) -> Architecture:
    """Return the architecture of that name, or raise ValueError that names the file."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    what = NOT_LANGUAGE_MODELS.get(name)
    if what:
        raise ValueError(
            f"[load] Expected a language model in {path!r}. Received architecture {name!r}, {what}."
        )
    raise ValueError(
        f"[load] Expected an architecture of {', '.join(sorted(ARCHITECTURES))}. Received "
        f"{name!r} in {path!r}."
    )
