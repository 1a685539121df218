"""Tiny random models that alternate gated delta rule and full attention: qwen35, qwen35moe and
qwen3next, with every layout of their files that the loader knows.

As models.py: packed blocks from a seed, in the file's layout. Sizes are such that a wrong direction
shows: value heads are not key heads times themselves, intervals are not 4, expert widths differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from zlib import crc32

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from reference.models import Packed, _matrix, _vector
from reference.vocabulary import SIZE, add_vocabulary

# In turn over a model's matrices: those of a UD-Q4_K_XL file first, of early and small ones next.
_TYPES_256 = (
    *("q4_k", "q5_k", "q6_k", "iq4_xs", "q8_0", "mxfp4", "q4_k", "iq4_nl", "bf16", "q5_k", "f16"),
    *("q5_1", "q6_k"),
)
_TYPES_32 = ("q8_0", "iq4_nl", "mxfp4", "bf16", "q5_1", "f16")
_EMBED_GAIN = 12.0
_GATE_TYPES = ("q4_k", "q8_0", "f16", "f32", "bf16")  # of ssm_alpha and ssm_beta


@dataclass(frozen=True)
class Spec:
    """What makes a model; see models.Spec."""

    name: str
    arch: str
    seed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    key_heads: int
    value_heads: int
    state: int
    ffn: int  # of an expert, where there are some
    embed_type: str
    rope_base: float
    interval: int | None = None
    recurrent: tuple[bool, ...] | None = None  # instead of an interval
    output_type: str | None = None  # None: tied to the embedding
    hidden: int = 256
    eps: float = 1e-6
    experts: int = 0
    used: int = 0
    shared_ffn: int = 0
    draft: bool = False  # a draft block (MTP) after the last layer
    fused: bool = False  # gate and up of experts, and q, k and v of attention, in one tensor
    bare_dt: bool = False  # `ssm_dt` without `.bias`, kv heads as an array, router row as (1, H)
    old_next: bool = False  # qwen3next's `ssm_in`

    @property
    def linear(self) -> list[bool]:
        if self.recurrent:
            return list(self.recurrent)
        return [(i + 1) % self.interval != 0 for i in range(self.layers)]


# fmt: off
_SPECS = (
    Spec("qwen35", "qwen35", seed=101, layers=8, interval=3, heads=4, kv_heads=2, head_dim=64,
         rotated=16, key_heads=4, value_heads=8, state=64, ffn=512, embed_type="q6_k",
         rope_base=20000.0),
    Spec("qwen35-r3", "qwen35", seed=105, layers=8, interval=5, heads=6, kv_heads=2, head_dim=48,
         rotated=12, key_heads=2, value_heads=6, state=128, ffn=768, embed_type="q5_k",
         output_type="q6_k", rope_base=3000.0, draft=True),
    Spec("qwen35-irregular", "qwen35", seed=101, layers=8, heads=4, kv_heads=1, head_dim=64,
         rotated=16, key_heads=3, value_heads=3, state=32, ffn=512, embed_type="bf16",
         rope_base=9000.0, output_type="mxfp4", eps=3e-5, bare_dt=True,
         recurrent=(False, True, True, False, False, True, True, True)),
    Spec("qwen35moe", "qwen35moe", seed=101, layers=8, interval=2, heads=4, kv_heads=2, head_dim=64,
         rotated=16, key_heads=4, value_heads=8, state=64, ffn=256, embed_type="q8_0",
         rope_base=30000.0, output_type="q4_k", experts=12, used=3, shared_ffn=512),
    Spec("qwen35moe-r3", "qwen35moe", seed=142, layers=8, interval=3, heads=4, kv_heads=1,
         head_dim=96, rotated=24, key_heads=2, value_heads=6, state=64, ffn=128, embed_type="q4_k",
         rope_base=7000.0, experts=8, used=2, shared_ffn=256, draft=True, fused=True, bare_dt=True),
    Spec("qwen3next", "qwen3next", seed=102, layers=8, interval=3, heads=4, kv_heads=2, head_dim=64,
         rotated=16, key_heads=2, value_heads=6, state=64, ffn=128, embed_type="q6_k",
         rope_base=11000.0, output_type="q6_k", experts=8, used=3, shared_ffn=256),
    Spec("qwen3next-old", "qwen3next", seed=107, layers=8, interval=4, heads=4, kv_heads=2,
         head_dim=64, rotated=32, key_heads=4, value_heads=8, state=32, ffn=128, embed_type="q5_k",
         rope_base=6000.0, output_type="q8_0", experts=8, used=2, shared_ffn=384, old_next=True),
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
    start = s.seed % len(_TYPES_256)
    types = {
        256: cycle(_TYPES_256[start:] + _TYPES_256[:start]),
        32: cycle(_TYPES_32),
        1: cycle(_GATE_TYPES),
    }

    def matrix(rows: int, K: int, gain: float = 1.0, experts: int = 0, gates: bool = False):
        qtype = next(types[1 if gates else 32 if K % 256 else 256])
        _, packed = _matrix(qtype, rows * max(experts, 1), K, gain, rng)
        return qtype, packed.reshape(experts, rows, -1) if experts else packed

    # Large embeddings, next to which a layer adds little: a random model is chaotic otherwise, and
    # turns the rounding of 16-bit activations into other experts and other tokens. A tied head
    # prefers the token it has just read, unless the signs of the last norm are mixed.
    signs = 1.0 if s.output_type else rng.choice([-0.25, 0.25], s.hidden)
    out = {
        "token_embd.weight": _matrix(s.embed_type, SIZE, s.hidden, _EMBED_GAIN, rng),
        "output_norm.weight": _vector(signs * rng.uniform(0.6, 1.4, s.hidden)),
    }
    if s.output_type:
        out["output.weight"] = _matrix(s.output_type, SIZE, s.hidden, 3.0, rng)
    for layer, linear in enumerate(s.linear):
        for key, value in _layer(s, linear, matrix, rng):
            out[f"blk.{layer}.{key}"] = value
    if s.draft:
        for key, value in (*_layer(s, False, matrix, rng), *_draft(s, matrix, rng)):
            out[f"blk.{s.layers}.{key}"] = value
    return out


def fingerprint(name: str) -> int:
    """CRC-32 of a model's tensors: numpy may change its random streams, and would change it."""
    crc = 0
    for key, (qtype, packed) in tensors(name).items():
        crc = crc32(packed.tobytes(), crc32(f"{key} {qtype}".encode(), crc))
    return crc


def _norm(rng: np.random.Generator, size: int, low: float = 0.6, high: float = 1.4) -> Packed:
    return _vector(rng.uniform(low, high, size))


def _layer(s: Spec, linear: bool, matrix, rng) -> Iterator[tuple[str, Packed]]:
    yield "attn_norm.weight", _norm(rng, s.hidden)
    yield "post_attention_norm.weight", _norm(rng, s.hidden)
    yield from _linear(s, matrix, rng) if linear else _attention(s, matrix, rng)
    yield from _experts(s, matrix) if s.experts else _mlp(s, matrix)


def _attention(s: Spec, matrix, rng) -> Iterator[tuple[str, Packed]]:
    q, kv = 2 * s.heads * s.head_dim, s.kv_heads * s.head_dim
    if s.fused:
        yield "attn_qkv.weight", matrix(q + 2 * kv, s.hidden, 1.2)
    else:
        yield "attn_q.weight", matrix(q, s.hidden, 1.3)
        yield "attn_k.weight", matrix(kv, s.hidden, 1.3)
        yield "attn_v.weight", matrix(kv, s.hidden)
    yield "attn_output.weight", matrix(s.hidden, s.heads * s.head_dim, 0.6)
    yield "attn_q_norm.weight", _norm(rng, s.head_dim, 0.8, 2.0)
    yield "attn_k_norm.weight", _norm(rng, s.head_dim, 0.8, 2.0)


def _linear(s: Spec, matrix, rng) -> Iterator[tuple[str, Packed]]:
    keys, values = s.key_heads * s.state, s.value_heads * s.state
    if s.old_next:
        yield "ssm_in.weight", matrix(2 * keys + 2 * values, s.hidden)
    else:
        yield "attn_qkv.weight", matrix(2 * keys + values, s.hidden)
        yield "attn_gate.weight", matrix(values, s.hidden)
    if s.arch == "qwen3next":
        yield "ssm_ba.weight", matrix(2 * s.value_heads, s.hidden, gates=True)
    else:
        yield "ssm_alpha.weight", matrix(s.value_heads, s.hidden, gates=True)
        yield "ssm_beta.weight", matrix(s.value_heads, s.hidden, gates=True)
    # Decays that forget within two to forty tokens.
    yield "ssm_a", _vector(-np.exp(rng.uniform(np.log(0.05), 0, s.value_heads)))
    dt = _vector(rng.uniform(-1, 1, s.value_heads))
    yield "ssm_dt" if s.bare_dt else "ssm_dt.bias", dt
    kernel = rng.normal(0, 0.6, (2 * keys + values, 4)).astype("<f4")
    yield "ssm_conv1d.weight", ("f32", kernel.view(np.uint8))
    yield "ssm_norm.weight", _norm(rng, s.state)
    yield "ssm_out.weight", matrix(s.hidden, values, 0.3)


def _mlp(s: Spec, matrix) -> Iterator[tuple[str, Packed]]:
    yield "ffn_gate.weight", matrix(s.ffn, s.hidden)
    yield "ffn_up.weight", matrix(s.ffn, s.hidden)
    yield "ffn_down.weight", matrix(s.hidden, s.ffn, 0.5)


def _experts(s: Spec, matrix) -> Iterator[tuple[str, Packed]]:
    router, shared_gate = matrix(s.experts, s.hidden, 7.0), matrix(1, s.hidden, gates=True)
    yield "ffn_gate_inp.weight", router
    qtype, packed = shared_gate
    yield "ffn_gate_inp_shexp.weight", (qtype, packed if s.bare_dt else packed[0])
    if s.fused:
        yield "ffn_gate_up_exps.weight", matrix(2 * s.ffn, s.hidden, experts=s.experts)
    else:
        yield "ffn_gate_exps.weight", matrix(s.ffn, s.hidden, experts=s.experts)
        yield "ffn_up_exps.weight", matrix(s.ffn, s.hidden, experts=s.experts)
    yield "ffn_down_exps.weight", matrix(s.hidden, s.ffn, 0.3, experts=s.experts)
    yield "ffn_gate_shexp.weight", matrix(s.shared_ffn, s.hidden)
    yield "ffn_up_shexp.weight", matrix(s.shared_ffn, s.hidden)
    yield "ffn_down_shexp.weight", matrix(s.hidden, s.shared_ffn, 0.5)


def _draft(s: Spec, matrix, rng) -> Iterator[tuple[str, Packed]]:
    yield "nextn.eh_proj.weight", matrix(s.hidden, 2 * s.hidden)
    for stem in ("enorm", "hnorm", "shared_head_norm"):
        yield f"nextn.{stem}.weight", _norm(rng, s.hidden)


def write_model(
    name: str,
    path: str | Path,
    replace: dict[str, Packed] | None = None,
    *,
    edit=lambda tensors: tensors,
    alignment: int = 64,
    **writer_options,
) -> None:
    """Write a model's .gguf file.

    Parameters
    ----------
    name : one of `MODELS`
    path : file to write
    replace : tensors to write instead of the model's own, for twins in another type
    edit : function of the tensors, for files that are to be refused or in another order
    alignment : of the tensors in the file
    writer_options : of GGUFWriter, such as `split_max_tensors`
    """
    s = spec(name)
    writer = GGUFWriter(path, s.arch, **writer_options)
    writer.add_name(f"mlx-gguf reference {name}")
    writer.add_custom_alignment(alignment)
    writer.add_context_length(512)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers + s.draft)
    writer.add_head_count(s.heads)
    if s.bare_dt:
        kinds = [*s.linear, False] if s.draft else s.linear
        writer.add_head_count_kv([s.kv_heads * (not linear) for linear in kinds])
    else:
        writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_rope_freq_base(s.rope_base)
    writer.add_rope_dimension_count(s.rotated)
    if s.arch != "qwen3next":
        # Shares of the rotated pairs, dealt in turn; without images all have the same position.
        pairs = s.rotated // 2
        writer.add_rope_dimension_sections([*((pairs + 2 - i) // 3 for i in range(3)), 0])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(s.state)
    writer.add_ssm_group_count(s.key_heads)
    writer.add_ssm_time_step_rank(s.value_heads)
    writer.add_ssm_inner_size(s.value_heads * s.state)
    if s.recurrent:
        writer.add_array(f"{s.arch}.attention.recurrent_layers", list(s.recurrent))
    else:
        writer.add_full_attention_interval(s.interval)
    if s.draft:
        writer.add_nextn_predict_layers(1)
    if s.experts:
        writer.add_expert_count(s.experts)
        writer.add_expert_used_count(s.used)
        writer.add_expert_feed_forward_length(s.ffn)
        writer.add_expert_shared_feed_forward_length(s.shared_ffn)
    else:
        writer.add_feed_forward_length(s.ffn)
    add_vocabulary(writer, s.arch)
    for key, (qtype, packed) in edit(tensors(name) | (replace or {})).items():
        writer.add_tensor(key, packed, raw_dtype=GGMLQuantizationType[qtype.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
