"""Tiny random models of the architectures that are mlx-lm's classes under other names: qwen3moe,
granite, phi3 and gemma2. As models.py, whose parts it uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from zlib import crc32

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

from reference.models import Packed, _matrix, _vector
from reference.vocabulary import SIZE, add_vocabulary

_TYPES_256 = ("q4_k", "q5_k", "mxfp4", "q6_k", "iq4_xs", "q8_0", "iq4_nl", "bf16", "q5_k", "f16")
_TYPES_32 = ("q8_0", "iq4_nl", "q5_1", "bf16", "mxfp4")


@dataclass(frozen=True)
class Spec:
    """What makes a model; see models.Spec."""

    name: str
    arch: str
    seed: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of an expert, where there are some
    embed_type: str
    rope_base: float
    output_type: str | None = None
    layers: int = 3
    hidden: int = 256
    eps: float = 3e-5
    rotated: int | None = None  # phi3: how much of a head
    experts: int = 0
    used: int = 0
    fused: bool = False  # gate and up of experts in one tensor
    yarn: float | None = None  # scaling factor
    original_context: int = 64
    long_rope: bool = False  # phi3: factors of the frequencies

    @property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """phi3's long and short divisors."""
        pairs = np.arange(self.rotated // 2, dtype=np.float32)
        return 1 + pairs / 2, 1 + pairs / 16


# fmt: off
_SPECS = (
    Spec("qwen3moe", "qwen3moe", seed=204, heads=4, kv_heads=2, head_dim=48, ffn=128,
         embed_type="q6_k", rope_base=7000.0, output_type="q4_k", experts=12, used=3),
    Spec("qwen3moe-yarn", "qwen3moe", seed=202, heads=4, kv_heads=1, head_dim=64, ffn=256,
         embed_type="q5_k", rope_base=900.0, output_type="bf16", experts=8, used=3, fused=True,
         yarn=4.0),
    Spec("granite", "granite", seed=207, heads=8, kv_heads=2, head_dim=32, ffn=512,
         embed_type="q4_k", rope_base=3000.0),
    Spec("phi3", "phi3", seed=201, heads=4, kv_heads=2, head_dim=64, ffn=512, rotated=48,
         embed_type="q6_k", rope_base=2000.0, output_type="q8_0"),
    # The original context is shorter than the prompt, so that all use the long factors.
    Spec("phi3-long", "phi3", seed=205, heads=8, kv_heads=4, head_dim=32, ffn=512, rotated=32,
         embed_type="q5_k", rope_base=5000.0, original_context=16, long_rope=True),
    Spec("gemma2", "gemma2", seed=239, heads=4, kv_heads=2, head_dim=48, ffn=512,
         embed_type="q6_k", rope_base=4000.0),
)
# fmt: on
#: Names of the models.
MODELS = [spec.name for spec in _SPECS]
#: granite's multipliers, by the keys of the file.
GRANITE = {
    "attention.scale": 0.09,
    "embedding_scale": 0.5,
    "residual_scale": 0.7,
    "logit_scale": 1.25,
}
#: gemma2's caps of attention scores and logits, low enough to matter.
SOFTCAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 9.0}


def spec(name: str) -> Spec:
    """The description of one of `MODELS`."""
    return next(s for s in _SPECS if s.name == name)


def tensors(name: str) -> dict[str, Packed]:
    """The tensors of a model under their GGUF names, as the file holds them."""
    s = spec(name)
    rng = np.random.default_rng(s.seed)
    start = s.seed % len(_TYPES_256)
    types = {256: cycle(_TYPES_256[start:] + _TYPES_256[:start]), 32: cycle(_TYPES_32)}

    def matrix(rows: int, K: int, gain: float = 1.0, experts: int = 0) -> Packed:
        qtype = next(types[32 if K % 256 else 256])
        _, packed = _matrix(qtype, rows * max(experts, 1), K, gain, rng)
        return qtype, packed.reshape(experts, rows, -1) if experts else packed

    # A tied head prefers the token it has just read, unless the signs of the last norm are mixed.
    # Experts are chosen by less noise next to large embeddings, as in hybrid.py.
    embed_gain = 12.0 if s.experts else 3.0
    tied_norm = 3.0 / embed_gain
    signs = 1.0 if s.output_type else rng.choice([-tied_norm, tied_norm], s.hidden)
    out = {
        "token_embd.weight": _matrix(s.embed_type, SIZE, s.hidden, embed_gain, rng),
        "output_norm.weight": _vector(signs * rng.uniform(0.6, 1.4, s.hidden)),
    }
    if s.output_type:
        out["output.weight"] = _matrix(s.output_type, SIZE, s.hidden, 3.0, rng)
    if s.long_rope:
        long, short = s.factors
        out["rope_factors_long.weight"] = _vector(long)
        out["rope_factors_short.weight"] = _vector(short)
    for layer in range(s.layers):
        for key, value in _layer(s, matrix, rng):
            out[f"blk.{layer}.{key}.weight"] = value
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

    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield "attn_norm", norm(s.hidden)
    yield "ffn_norm", norm(s.hidden)
    if s.arch == "phi3":
        yield "attn_qkv", matrix(q + 2 * kv, s.hidden, 1.2)
    else:
        yield "attn_q", matrix(q, s.hidden, 1.3)
        yield "attn_k", matrix(kv, s.hidden, 1.3)
        yield "attn_v", matrix(kv, s.hidden)
    yield "attn_output", matrix(s.hidden, q)
    if s.arch == "qwen3moe":
        yield "attn_q_norm", norm(s.head_dim, 0.8, 2.0)
        yield "attn_k_norm", norm(s.head_dim, 0.8, 2.0)
    if s.arch == "gemma2":
        yield "post_attention_norm", norm(s.hidden)
        yield "post_ffw_norm", norm(s.hidden)
    if s.experts:
        yield "ffn_gate_inp", matrix(s.experts, s.hidden, 7.0)
        if s.fused:
            yield "ffn_gate_up_exps", matrix(2 * s.ffn, s.hidden, experts=s.experts)
        else:
            yield "ffn_gate_exps", matrix(s.ffn, s.hidden, experts=s.experts)
            yield "ffn_up_exps", matrix(s.ffn, s.hidden, experts=s.experts)
        yield "ffn_down_exps", matrix(s.hidden, s.ffn, 0.5, experts=s.experts)
        return
    if s.arch == "phi3":
        yield "ffn_up", matrix(2 * s.ffn, s.hidden)
    else:
        yield "ffn_gate", matrix(s.ffn, s.hidden)
        yield "ffn_up", matrix(s.ffn, s.hidden)
    yield "ffn_down", matrix(s.hidden, s.ffn)


def write_model(name: str, path: str | Path, replace: dict[str, Packed] | None = None) -> None:
    """Write a model's .gguf file; see models.write_model."""
    s = spec(name)
    writer = GGUFWriter(path, s.arch)
    writer.add_name(f"mlx-gguf reference {name}")
    writer.add_context_length(512)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_rope_freq_base(s.rope_base)
    if s.experts:
        writer.add_expert_count(s.experts)
        writer.add_expert_used_count(s.used)
        writer.add_expert_feed_forward_length(s.ffn)
    else:
        writer.add_feed_forward_length(s.ffn)
    if s.arch in ("qwen3moe", "gemma2"):
        writer.add_key_length(s.head_dim)
        writer.add_value_length(s.head_dim)
    if s.rotated:
        writer.add_rope_dimension_count(s.rotated)
        writer.add_rope_scaling_orig_ctx_len(s.original_context)
    if s.yarn:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(s.yarn)
        writer.add_rope_scaling_orig_ctx_len(s.original_context)
    for key, value in ({"granite": GRANITE, "gemma2": SOFTCAPS}.get(s.arch) or {}).items():
        writer.add_float32(f"{s.arch}.{key}", value)
    add_vocabulary(writer, s.arch)
    for key, (qtype, packed) in (tensors(name) | (replace or {})).items():
        writer.add_tensor(key, packed, raw_dtype=GGMLQuantizationType[qtype.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
