"""The models of hybrid.py in transformers' own classes, for make_logits.py."""

from __future__ import annotations

import re

import numpy as np
import torch
import transformers

from blocks import dequantize64
from reference import hybrid
from reference.vocabulary import SIZE

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Norms that compute 1 + w, so that the file has one more than the parameter.
_PLUS_ONE = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")


def build(s: hybrid.Spec) -> torch.nn.Module:
    """The model in float32, on the decoded weights of the file."""
    model = transformers.AutoModelForCausalLM.from_config(config(s), attn_implementation="eager")
    model.load_state_dict(state_dict(s), strict=True)
    return model.float().eval()


def config(s: hybrid.Spec) -> transformers.PretrainedConfig:
    """The transformers configuration of a model."""
    common = {
        "vocab_size": SIZE,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "rms_norm_eps": s.eps,
        "max_position_embeddings": 512,
        "linear_key_head_dim": s.state,
        "linear_value_head_dim": s.state,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "layer_types": [("full_attention", "linear_attention")[linear] for linear in s.linear],
        "tie_word_embeddings": s.output_type is None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": s.rope_base,
            "partial_rotary_factor": s.rotated / s.head_dim,
        },
        "experts_implementation": "eager",
    }
    if s.arch == "qwen35":
        return transformers.Qwen3_5TextConfig(intermediate_size=s.ffn, **common)
    experts = {
        "num_experts": s.experts,
        "num_experts_per_tok": s.used,
        "moe_intermediate_size": s.ffn,
        "shared_expert_intermediate_size": s.shared_ffn,
    }
    if s.arch == "qwen35moe":
        return transformers.Qwen3_5MoeTextConfig(**experts, **common)
    return transformers.Qwen3NextConfig(**experts, **common)


def state_dict(s: hybrid.Spec) -> dict[str, torch.Tensor]:
    """The model's parameters as transformers names and lays them out."""
    weights = {
        key: dequantize64(packed, qtype) for key, (qtype, packed) in hybrid.tensors(s.name).items()
    }
    state = {}
    for stem, name in _TOP.items():
        if f"{stem}.weight" in weights:
            state[f"{name}.weight"] = weights[f"{stem}.weight"] - (stem in _PLUS_ONE)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    for layer, linear in enumerate(s.linear):
        own = {
            key.removeprefix(f"blk.{layer}."): value
            for key, value in weights.items()
            if key.startswith(f"blk.{layer}.")
        }
        # Without a layer's prefix, as if there were only this one.
        for name, value in _layer(s, linear, own).items():
            state[f"model.layers.{layer}.{name}"] = value
    return {name: torch.from_numpy(np.float32(value)) for name, value in state.items()}


def _layer(s: hybrid.Spec, linear: bool, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    state = {}
    if linear:
        _mixer(s, own, state)
    elif s.fused:
        sizes = 2 * s.heads * s.head_dim, s.kv_heads * s.head_dim
        parts = np.split(own.pop("attn_qkv.weight"), [sizes[0], sum(sizes)])
        state |= {f"self_attn.{c}_proj.weight": p for c, p in zip("qkv", parts, strict=True)}
    if s.experts:
        gate_up = own.pop("ffn_gate_up_exps.weight", None)
        if gate_up is None:
            halves = own.pop("ffn_gate_exps.weight"), own.pop("ffn_up_exps.weight")
            gate_up = np.concatenate(halves, axis=1)
        state["mlp.experts.gate_up_proj"] = gate_up
        state["mlp.experts.down_proj"] = own.pop("ffn_down_exps.weight")
        own["ffn_gate_inp_shexp.weight"] = own["ffn_gate_inp_shexp.weight"].reshape(1, s.hidden)
    for key, value in own.items():
        stem, kind = re.fullmatch(r"(\w+)\.(weight|bias)", key).groups()
        state[f"{_LAYER[stem]}.{kind}"] = value - (stem in _PLUS_ONE)
    return state


def _mixer(s: hybrid.Spec, own: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> None:
    """Undo, by indices, what the converter does to the tensors of a gated delta rule."""
    heads = np.arange(s.value_heads)
    if s.arch != "qwen3next":
        # Head `h` of the file belongs to key head h % key_heads; transformers wants those of a
        # key head side by side.
        heads = np.argsort(heads % s.key_heads, kind="stable")
    wide = (heads[:, None] * s.state + np.arange(s.state)).ravel()
    keys = 2 * s.key_heads * s.state
    qkv = np.concatenate([np.arange(keys), keys + wide])
    state["linear_attn.A_log"] = np.log(-own.pop("ssm_a"))[heads]
    state["linear_attn.dt_bias"] = own.pop("ssm_dt" if s.bare_dt else "ssm_dt.bias")[heads]
    kernel = own.pop("ssm_conv1d.weight").reshape(-1, 1, 4)
    state["linear_attn.conv1d.weight"] = kernel[qkv]
    own["ssm_out.weight"] = own["ssm_out.weight"][:, wide]
    if s.arch != "qwen3next":
        own["attn_qkv.weight"] = own["attn_qkv.weight"][qkv]
        own["attn_gate.weight"] = own["attn_gate.weight"][wide]
        for key in ("ssm_alpha.weight", "ssm_beta.weight"):
            own[key] = own[key][heads]
    elif not s.old_next:
        # Of each key head: its q, its k, the v of its value heads, their z.
        q, k, v = np.split(own.pop("attn_qkv.weight"), [keys // 2, keys])
        parts = (q, k, v, own.pop("attn_gate.weight"))
        by_head = [part.reshape(s.key_heads, -1, s.hidden) for part in parts]
        own["ssm_in.weight"] = np.concatenate(by_head, axis=1).reshape(-1, s.hidden)
