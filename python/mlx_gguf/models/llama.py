"""llama: Llama, Mistral, SmolLM2 and others saved under the same name."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn import Module

from ..file import GGUFFile
from .base import Architecture, Keys, check_full_rope, common_config


def config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    fields = common_config(keys, file)
    check_full_rope(keys, fields)
    return {
        **fields,
        # The converter reorders the rows of q and k so that the two halves of a
        # rotated pair lie side by side, which is how traditional rope pairs them:
        # the packed rows stay where they are in the file.
        "rope_traditional": True,
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_bias": "blk.0.ffn_up.bias" in file,
    }


class DividedRope(Module):
    """Rotary embedding whose frequencies are divided by factors of the file (Llama 3.1)."""

    def __init__(self, dims: int, base: float, factors: mx.array):
        super().__init__()
        self.dims = dims
        periods = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
        self._freqs = periods * factors.astype(mx.float32)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x,
            self.dims,
            traditional=True,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )


def finish(model: Any, keys: Keys, file: GGUFFile) -> None:
    if "rope_freqs.weight" not in file:
        return
    dims = model.args.head_dim
    factors = file["rope_freqs.weight"]
    if factors.shape != (dims // 2,):
        raise ValueError(
            f"[load] Expected rope_freqs.weight of shape ({dims // 2},). Received {factors.shape}."
        )
    rope = DividedRope(dims, model.args.rope_theta, factors)
    for layer in model.layers:
        layer.self_attn.rope = rope


ARCHITECTURE: Architecture = Architecture(
    name="llama",
    module="llama",
    config=config,
    extras=frozenset({"rope_freqs.weight"}),
    finish=finish,
    half_range=True,
)
