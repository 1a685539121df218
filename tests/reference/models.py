"""Tiny random models in real quantised types, rebuilt from a seed wherever they are needed.

The weights are random packed blocks in the layout of the file, so nothing is ever quantised and
no file is committed: `write_model` makes the .gguf, make_logits.py decodes the same blocks with
gguf-py and asks PyTorch what the model says. Needs numpy and gguf only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from zlib import crc32

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

from blocks import random_blocks
from reference.vocabulary import SIZE, add_vocabulary

#: A tensor as the file holds it: its type and its bytes, uint8 [rows, row_bytes] or [row_bytes].
Packed = tuple[str, np.ndarray]

# In turn over a model's matrices. K-quants lead, as they do in real files.
_TYPES_256 = (
    *("q4_k", "q5_k", "q6_k", "iq4_xs", "q8_0", "q4_k", "q5_0", "q4_1", "q5_k", "f16", "q6_k"),
    *("q4_k", "q3_k", "bf16", "q5_1", "iq4_nl", "q2_k", "q4_0", "mxfp4"),
)
_TYPES_32 = ("q8_0", "q5_0", "iq4_nl", "q5_1", "q4_1", "f16")


@dataclass(frozen=True)
class Llama3Scaling:
    """The rope scaling that the converter turns into `rope_freqs.weight`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def divisors(self, base: float, head_dim: int) -> np.ndarray:
        wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
        turns = self.original_context / wavelength
        span = self.high_freq_factor - self.low_freq_factor
        smooth = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return (1 / ((1 - smooth) / self.factor + smooth)).astype(np.float32)


@dataclass(frozen=True)
class Spec:
    """What makes a model: sizes, conventions and the seed of its weights.

    Head counts, head_dim, rope bases and epsilons differ from every library default and from one
    another, so that a forgotten key or a reshape in the wrong direction changes the logits.
    """

    name: str
    arch: str
    seed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    embed_type: str
    rope_base: float
    output_type: str | None = None  # None: tied to the embedding
    hidden: int = 256
    eps: float = 3e-5
    key_length: bool = True  # whether the file says head_dim
    llama3: Llama3Scaling | None = None
    linear_factor: float | None = None
    window: int | None = None
    pattern: int | None = None  # None: not in the file, every 6th layer is global
    local_base: float | None = None  # None: not in the file, 10000


# fmt: off
_SPECS = (
    Spec("llama", "llama", seed=31, layers=3, heads=8, kv_heads=2, head_dim=32, ffn=512,
         embed_type="q4_k", output_type="q6_k", rope_base=20000.0, key_length=False),
    Spec("llama-tied", "llama", seed=2, layers=3, heads=4, kv_heads=2, head_dim=48, ffn=768,
         embed_type="q6_k", rope_base=5000.0),
    Spec("llama-rope-freqs", "llama", seed=13, layers=3, heads=4, kv_heads=1, head_dim=64, ffn=512,
         embed_type="q8_0", output_type="q5_k", rope_base=500.0, key_length=False,
         llama3=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    Spec("qwen2", "qwen2", seed=4, layers=3, heads=8, kv_heads=2, head_dim=32, ffn=768,
         embed_type="q5_k", output_type="bf16", rope_base=30000.0, key_length=False),
    Spec("qwen3", "qwen3", seed=55, layers=3, heads=8, kv_heads=4, head_dim=48, ffn=512,
         embed_type="q6_k", rope_base=2000.0),
    Spec("qwen3-untied", "qwen3", seed=6, layers=2, heads=4, kv_heads=2, head_dim=96, ffn=768,
         embed_type="f16", output_type="q4_k", rope_base=9000.0),
    Spec("gemma3", "gemma3", seed=37, layers=7, heads=4, kv_heads=2, head_dim=48, ffn=512,
         embed_type="q6_k", rope_base=50000.0, window=8, pattern=3, local_base=3000.0),
    Spec("gemma3-linear", "gemma3", seed=38, layers=7, heads=8, kv_heads=1, head_dim=64, ffn=512,
         embed_type="q8_0", rope_base=80000.0, window=12, linear_factor=8.0),
)
# fmt: on
#: Names of the models.
MODELS = [spec.name for spec in _SPECS]


def spec(name: str) -> Spec:
    """The description of one of `MODELS`."""
    return next(s for s in _SPECS if s.name == name)


def tensors(name: str) -> dict[str, Packed]:
    """The tensors of a model under their GGUF names, as the file holds them."""
    s = spec(name)
    rng = np.random.default_rng(s.seed)
    types = {256: cycle(_TYPES_256[s.seed % 4 :] + _TYPES_256[: s.seed % 4]), 32: cycle(_TYPES_32)}

    def matrix(rows: int, K: int, gain: float = 1.0) -> Packed:
        return _matrix(next(types[32 if K % 256 else 256]), rows, K, gain, rng)

    # A tied head prefers the token it has just read, unless the signs of the last norm are mixed.
    signs = 1.0 if s.output_type else rng.choice([-1.0, 1.0], s.hidden)
    embed_gain = 3.0 if s.output_type is None else 1.5
    out = {
        "token_embd.weight": _matrix(s.embed_type, SIZE, s.hidden, embed_gain, rng),
        "output_norm.weight": _vector(signs * rng.uniform(0.6, 1.4, s.hidden)),
    }
    if s.output_type:
        out["output.weight"] = _matrix(s.output_type, SIZE, s.hidden, 3.0, rng)
    if s.llama3:
        out["rope_freqs.weight"] = _vector(s.llama3.divisors(s.rope_base, s.head_dim))
    for layer in range(s.layers):
        for key, value in _layer(s, matrix, rng):
            out[f"blk.{layer}.{key}"] = value
    return out


def fingerprint(name: str) -> int:
    """CRC-32 of a model's tensors: numpy may change its random streams, and would change it."""
    crc = 0
    for key, (qtype, packed) in tensors(name).items():
        crc = crc32(packed.tobytes(), crc32(f"{key} {qtype}".encode(), crc))
    return crc


def _layer(s: Spec, matrix, rng: np.random.Generator) -> Iterator[tuple[str, Packed]]:
    def norm(size: int, low: float = 0.6, high: float = 1.4) -> Packed:
        return _vector(rng.uniform(low, high, size))

    q_rows, kv_rows = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield "attn_norm.weight", norm(s.hidden)
    yield "attn_q.weight", matrix(q_rows, s.hidden, 1.3)
    yield "attn_k.weight", matrix(kv_rows, s.hidden, 1.3)
    yield "attn_v.weight", matrix(kv_rows, s.hidden)
    yield "attn_output.weight", matrix(s.hidden, q_rows)
    if s.arch == "qwen2":
        for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield f"attn_{letter}.bias", _vector(rng.normal(0, 0.5, rows))
    if s.arch in ("qwen3", "gemma3"):
        yield "attn_q_norm.weight", norm(s.head_dim, 0.8, 2.0)
        yield "attn_k_norm.weight", norm(s.head_dim, 0.8, 2.0)
    yield "ffn_norm.weight", norm(s.hidden)
    yield "ffn_gate.weight", matrix(s.ffn, s.hidden)
    yield "ffn_up.weight", matrix(s.ffn, s.hidden)
    yield "ffn_down.weight", matrix(s.hidden, s.ffn)
    if s.arch == "gemma3":
        yield "post_attention_norm.weight", norm(s.hidden)
        yield "post_ffw_norm.weight", norm(s.hidden)


def _matrix(qtype: str, rows: int, K: int, gain: float, rng: np.random.Generator) -> Packed:
    # x of unit size gives x @ W.T of size `gain`.
    size = (0.7 * gain * K**-0.5, 1.4 * gain * K**-0.5)
    return qtype, random_blocks(qtype, rows, K, rng, size=size)


def _vector(values: np.ndarray) -> Packed:
    return "f32", values.astype("<f4").view(np.uint8)


def write_model(name: str, path: str | Path, replace: dict[str, Packed] | None = None) -> None:
    """Write a model's .gguf file.

    Parameters
    ----------
    name : one of `MODELS`
    path : file to write
    replace : tensors to write instead of the model's own, for twins in another type
    """
    s = spec(name)
    writer = GGUFWriter(path, s.arch)
    writer.add_name(f"mlx-gguf reference {name}")
    writer.add_context_length(512)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_rope_freq_base(s.rope_base)
    if s.key_length:
        writer.add_key_length(s.head_dim)
        writer.add_value_length(s.head_dim)
    if s.arch == "llama":
        writer.add_rope_dimension_count(s.head_dim)
        writer.add_vocab_size(SIZE)
    if s.window is not None:
        writer.add_sliding_window(s.window)
    if s.pattern is not None:
        writer.add_sliding_window_pattern(s.pattern)
    if s.local_base is not None:
        writer.add_rope_freq_base_swa(s.local_base)
    if s.linear_factor is not None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(s.linear_factor)
    add_vocabulary(writer, s.arch)
    for key, (qtype, packed) in (tensors(name) | (replace or {})).items():
        writer.add_tensor(key, packed, raw_dtype=GGMLQuantizationType[qtype.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
