"""What architectures are made of: metadata keys, tensor names, transforms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..file import GGUFFile

# Tensors outside the layers, and those of a layer (behind `blk.N.`), that most
# architectures share.
OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Keys:
    """A file's metadata under the architecture's prefix."""

    def __init__(self, file: GGUFFile):
        self._file = file
        self._prefix = file.architecture + "."

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{arch}.{key}``, or the default."""
        return self._file.metadata.get(self._prefix + key, default)

    def number(self, key: str, default: float | None = None) -> Any:
        """The number at ``{arch}.{key}``; a missing or other value is an error."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(
                f"[load] Expected one number as metadata {self._prefix}{key} of "
                f"{self._file.path!r}. Received {value!r}."
            )
        return value


@dataclass(frozen=True)
class Architecture:
    """A row of the table of architectures.

    Attributes
    ----------
    name : str
        ``general.architecture`` of its files.
    module : str
        The module of ``mlx_lm.models`` with its ``Model`` and ``ModelArgs``.
    config : callable
        ``(keys, file) -> dict`` of ModelArgs fields beyond the common ones.
    outer, layer : mapping
        GGUF tensor stem to parameter stem, outside and inside of layers.
    transforms : mapping
        Parameter suffix to a function of the array, for small plain tensors.
    extras : frozenset of str
        Tensors that ``finish`` reads, so that they are not unused.
    finish : callable, optional
        ``(model, keys, file)``: what else the model needs from the file.
    half_range : bool
        Whether activations stay within float16; otherwise GPUs use bfloat16.
    """

    name: str
    module: str
    config: Callable[[Keys, GGUFFile], dict[str, Any]]
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    transforms: Mapping[str, Callable[[mx.array], mx.array]] = field(default_factory=dict)
    extras: frozenset[str] = frozenset()
    finish: Callable[[Any, Keys, GGUFFile], None] | None = None
    half_range: bool = False

    def parameter(self, tensor: str) -> str | None:
        """The parameter a tensor becomes, or None."""
        stem, _, kind = tensor.rpartition(".")
        if kind not in ("weight", "bias"):
            return None
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        if match:
            mapped = self.layer.get(match[2])
            return mapped and f"model.layers.{match[1]}.{mapped}.{kind}"
        mapped = self.outer.get(stem)
        return mapped and f"{mapped}.{kind}"


def common_config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    """ModelArgs fields that all decoder-only transformers take."""
    heads = keys.number("attention.head_count")
    hidden = keys.number("embedding_length")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.number("block_count"),
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": keys.number("attention.key_length", hidden // heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.number("context_length"),
        # The embedding's own rows: a list of tokens may be padded or cut.
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in file,
    }


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """mlx-lm's rope_scaling of ``rope.scaling.*``."""
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = keys.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.number(
                "rope.scaling.original_context_length"
            ),
        }
    raise ValueError(
        f"[load] Expected rope.scaling.type none, linear or yarn. Received {kind!r}."
    )


def check_full_rope(keys: Keys, config: dict[str, Any]) -> None:
    """Refuse a partial rotation where mlx-lm's class rotates the whole head."""
    dims = keys.number("rope.dimension_count", config["head_dim"])
    if dims != config["head_dim"]:
        raise ValueError(
            f"[load] Expected rope.dimension_count to be the head size, {config['head_dim']}. "
            f"Received {dims}."
        )
