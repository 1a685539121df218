"""What architectures are made of: metadata keys, tensor names, transforms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from textwrap import shorten
from typing import Any

import mlx.core as mx

from ..file import GGUFFile

Names = Mapping[str, str | tuple[str, ...]]

# More layers than any model has.
MOST_LAYERS = 10_000

_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")

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

# Tensors that only a draft block (multi-token prediction) has, next to a layer's own.
NEXTN = frozenset(
    {
        "nextn.eh_proj",
        "nextn.enorm",
        "nextn.hnorm",
        "nextn.embed_tokens",
        "nextn.shared_head_head",
        "nextn.shared_head_norm",
    }
)


class Keys:
    """A file's metadata under the architecture's prefix."""

    def __init__(self, file: GGUFFile):
        self._file = file
        self._prefix = file.architecture + "."

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{arch}.{key}``, or the default."""
        return self._file.metadata.get(self._prefix + key, default)

    def number(self, key: str, default: float | None = None) -> Any:
        """The finite number at ``{arch}.{key}``; a missing or other value is an error."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise self._unexpected("one number", key, value)
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """The number of things at ``{arch}.{key}``, from 1 to 2^31 - 1."""
        value = self.number(key, default)
        if not isinstance(value, int) or not 0 < value < 2**31:
            raise self._unexpected("a number of things from 1 to 2^31 - 1", key, value)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """The number above 0 at ``{arch}.{key}``."""
        value = self.number(key, default)
        if value <= 0:
            raise self._unexpected("a number above 0", key, value)
        return value

    def per_layer(self, key: str, default: int | None = None) -> int:
        """The count at ``{arch}.{key}``, which may be an array with 0 where it has no meaning."""
        value = self.get(key, default)
        if not isinstance(value, list):
            return self.count(key, default)
        distinct = {n for n in value if n != 0} if len(value) <= MOST_LAYERS else set()
        if len(distinct) != 1 or not isinstance(n := distinct.pop(), int) or not 0 < n < 2**31:
            raise self._unexpected("one number for all layers", key, value)
        return n

    def _unexpected(self, expected: str, key: str, value: Any) -> ValueError:
        return ValueError(
            f"[load] Expected {expected} as metadata {self._prefix}{key} of {self._file.path!r}. "
            f"Received {shorten(repr(value), 100)}."
        )


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
        GGUF tensor stem to parameter stem, outside and inside of layers; a tensor
        whose name is no stem (``ssm_a``) to the parameter's own name. A tuple takes
        the tensor's rows one after the other.
    otherwise : mapping
        As ``layer``, for layers without the parameters that ``layer`` names.
    rows : mapping
        Tensor stem to a function ``(model, array)`` that puts the packed rows into
        the order of the parameters.
    transforms : mapping
        Parameter suffix to a function of the array, for small plain tensors.
    float32 : frozenset of str
        Suffixes of parameters that keep float32 whatever the activations have.
    extras : frozenset of str
        Tensors that ``finish`` reads, so that they are not unused.
    draft : frozenset of str
        Stems of the tensors that only a draft block (MTP) after the last layer has:
        the block is left out, knowingly.
    finish : callable, optional
        ``(model, keys, file)``: what else the model needs from the file.
    prefix : str
        What the names of all parameters start with.
    half_range : bool
        Whether activations stay within float16; otherwise GPUs use bfloat16.
    """

    name: str
    module: str
    config: Callable[[Keys, GGUFFile], dict[str, Any]]
    outer: Names = field(default_factory=lambda: OUTER)
    layer: Names = field(default_factory=lambda: LAYER)
    otherwise: Names = field(default_factory=dict)
    rows: Mapping[str, Callable[[Any, mx.array], mx.array]] = field(default_factory=dict)
    transforms: Mapping[str, Callable[[mx.array], mx.array]] = field(default_factory=dict)
    float32: frozenset[str] = frozenset()
    extras: frozenset[str] = frozenset()
    draft: frozenset[str] = frozenset()
    finish: Callable[[Any, Keys, GGUFFile], None] | None = None
    prefix: str = ""
    half_range: bool = False

    def places(self, tensor: str) -> list[tuple[str, ...]]:
        """The parameters a tensor becomes; a second choice where its layer may be of two kinds."""
        match = _IN_LAYER.fullmatch(tensor)
        found = (
            [
                _full_names(f"model.layers.{match[1]}.", match[2], names)
                for names in (self.layer, self.otherwise)
            ]
            if match
            else [_full_names("", tensor, self.outer)]
        )
        return [tuple(self.prefix + name for name in names) for names in found if names]

    def row_order(self, tensor: str) -> Callable[[Any, mx.array], mx.array] | None:
        """The function of ``rows`` for a tensor, if it needs one."""
        match = _IN_LAYER.fullmatch(tensor)
        return self.rows.get(match[2].rpartition(".")[0]) if match else None

    def is_draft(self, tensor: str, layers: int) -> bool:
        """Whether a tensor belongs to a draft block after the last layer."""
        match = _IN_LAYER.fullmatch(tensor)
        if not (self.draft and match and int(match[1]) >= layers):
            return False
        return match[2].rpartition(".")[0] in self.draft or bool(self.places(tensor))


def _full_names(start: str, tensor: str, names: Names) -> tuple[str, ...]:
    """A tensor's parameters by one of the maps."""
    end, found = "", names.get(tensor)
    if found is None:
        stem, _, kind = tensor.rpartition(".")
        if kind in ("weight", "bias"):
            end, found = "." + kind, names.get(stem)
    if found is None:
        return ()
    return tuple(start + name + end for name in ((found,) if isinstance(found, str) else found))


def common_config(keys: Keys, file: GGUFFile, *, dense: bool = True) -> dict[str, Any]:
    """ModelArgs fields that all decoder-only transformers take.

    Files of mixtures of experts may lack the width of a dense MLP (``dense=False``).
    """
    heads = keys.per_layer("attention.head_count")
    hidden = keys.count("embedding_length")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": _layers(keys, file),
        "intermediate_size": keys.count("feed_forward_length") if dense else 0,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.per_layer("attention.head_count_kv", heads),
        "head_dim": keys.count("attention.key_length", hidden // heads),
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        # The embedding's own rows: a list of tokens may be padded or cut.
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rope_theta": keys.positive("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in file,
    }


def _layers(keys: Keys, file: GGUFFile) -> int:
    """The number of layers, each of which the file has something of.

    A draft block (MTP) at the end is counted in the file, but is no layer of the model.
    """
    layers = keys.count("block_count") - keys.number("nextn_predict_layers", 0)
    blocks = {match[1] for name in file.tensors if (match := _IN_LAYER.fullmatch(name))}
    if not 0 < layers <= len(blocks):
        raise ValueError(
            f"[load] Expected as many layers as {file.path!r} has blocks, {len(blocks)}. "
            f"Received {layers}."
        )
    return layers


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """mlx-lm's rope_scaling of ``rope.scaling.*``."""
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = keys.positive("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        }
    raise ValueError(f"[load] Expected rope.scaling.type none, linear or yarn. Received {kind!r}.")


def check_full_rope(keys: Keys, config: dict[str, Any]) -> None:
    """Refuse a partial rotation where mlx-lm's class rotates the whole head."""
    dims = keys.number("rope.dimension_count", config["head_dim"])
    if dims != config["head_dim"]:
        raise ValueError(
            f"[load] Expected rope.dimension_count to be the head size, {config['head_dim']}. "
            f"Received {dims}."
        )
