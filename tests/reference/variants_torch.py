"""The models of variants.py in transformers' own classes, for make_logits.py."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from blocks import dequantize64
from reference import variants
from reference.vocabulary import SIZE

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OTHERS = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def build(s: variants.Spec) -> torch.nn.Module:
    """The model in float32, on the decoded weights of the file."""
    model = transformers.AutoModelForCausalLM.from_config(config(s), attn_implementation="eager")
    model.load_state_dict(state_dict(s), strict=True)
    return model.float().eval()


def config(s: variants.Spec) -> transformers.PretrainedConfig:
    """The transformers configuration of a model."""
    rope: dict = {"rope_type": "default", "rope_theta": s.rope_base}
    if s.rotated:
        rope["partial_rotary_factor"] = s.rotated / s.head_dim
    if s.yarn:
        rope |= {
            "rope_type": "yarn",
            "factor": s.yarn,
            "original_max_position_embeddings": s.original_context,
        }
    if s.long_rope:
        long, short = s.factors
        rope |= {
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": s.original_context,
        }
    common = {
        "vocab_size": SIZE,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": s.eps,
        "max_position_embeddings": 512,
        "tie_word_embeddings": s.output_type is None,
        "rope_parameters": rope,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if s.arch == "qwen3moe":
        return transformers.Qwen3MoeConfig(
            head_dim=s.head_dim,
            num_experts=s.experts,
            num_experts_per_tok=s.used,
            moe_intermediate_size=s.ffn,
            norm_topk_prob=True,
            experts_implementation="eager",
            **common,
        )
    common["intermediate_size"] = s.ffn
    if s.arch == "granite":
        multipliers = variants.GRANITE
        return transformers.GraniteConfig(
            attention_multiplier=multipliers["attention.scale"],
            embedding_multiplier=multipliers["embedding_scale"],
            residual_multiplier=multipliers["residual_scale"],
            logits_scaling=multipliers["logit_scale"],
            **common,
        )
    if s.arch == "phi3":
        return transformers.Phi3Config(
            original_max_position_embeddings=s.original_context if s.long_rope else 512, **common
        )
    return transformers.Gemma2Config(
        head_dim=s.head_dim,
        query_pre_attn_scalar=s.head_dim,
        sliding_window=512,
        **variants.SOFTCAPS,
        **common,
    )


def state_dict(s: variants.Spec) -> dict[str, torch.Tensor]:
    """The model's parameters as transformers names and lays them out."""
    names = _NAMES | _OTHERS.get(s.arch, {})
    state, experts = {}, {}
    for key, (qtype, packed) in variants.tensors(s.name).items():
        weight = dequantize64(packed, qtype)
        *block, stem, _ = key.split(".")
        if stem.startswith("rope_factors"):
            continue  # in the configuration
        if s.arch == "granite" and stem in ("attn_q", "attn_k"):
            # The file has the two rows that rotate together side by side.
            pairs = weight.reshape(-1, s.head_dim // 2, 2, s.hidden)
            weight = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(weight.shape)
        if s.arch == "gemma2" and stem.endswith("norm"):
            weight = weight - 1.0
        start = f"model.layers.{block[1]}." if block else ""
        if stem.endswith("_exps"):
            experts[start, stem] = weight
        else:
            state[f"{start}{names[stem]}.weight"] = weight
    for start in {start for start, _ in experts}:
        gate_up = experts.get((start, "ffn_gate_up_exps"))
        if gate_up is None:
            halves = experts[start, "ffn_gate_exps"], experts[start, "ffn_up_exps"]
            gate_up = np.concatenate(halves, axis=1)
        state[f"{start}mlp.experts.gate_up_proj"] = gate_up
        state[f"{start}mlp.experts.down_proj"] = experts[start, "ffn_down_exps"]
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return {name: torch.from_numpy(np.float32(value)) for name, value in state.items()}
