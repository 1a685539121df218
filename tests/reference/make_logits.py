"""Make the .npz files: what PyTorch and transformers say of the models of models.py (logits.npz),
hybrid.py (hybrid.npz) and variants.py (variants.npz).

Every tensor is decoded with gguf-py and the converter's conventions are undone here, in the words
of this file, not of the project's loader. For each model the file holds, under `NAME/`:

- `fingerprint` uint32: of the weights that were used (`models.fingerprint`)
- `prompt` int32 [24]: random token ids
- `prompt_logits` float32 [24, 320]: at every position of the prompt
- `greedy` int32 [20]: ids chosen by argmax, the first one from the prompt's last logits
- `decode_logits` float32 [20, 320]: after feeding each id of `greedy` through the cache

Run `make reference`, or `python tests/reference/make_logits.py` with requirements.txt installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from blocks import dequantize64
from reference import hybrid, hybrid_torch, models, variants, variants_torch
from reference.vocabulary import SIZE, control_ids

PROMPT, STEPS = 24, 20
LAYER_NAMES = {
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
GEMMA_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def config(s: models.Spec) -> transformers.PretrainedConfig:
    """The transformers configuration of a model."""
    common = {
        "vocab_size": SIZE,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": s.eps,
        "max_position_embeddings": 512,
        "tie_word_embeddings": s.output_type is None,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    rope: dict = {"rope_type": "default", "rope_theta": s.rope_base}
    if s.llama3:
        rope |= {
            "rope_type": "llama3",
            "factor": s.llama3.factor,
            "low_freq_factor": s.llama3.low_freq_factor,
            "high_freq_factor": s.llama3.high_freq_factor,
            "original_max_position_embeddings": s.llama3.original_context,
        }
    if s.arch == "llama":
        return transformers.LlamaConfig(head_dim=s.head_dim, rope_parameters=rope, **common)
    if s.arch == "qwen2":
        return transformers.Qwen2Config(rope_parameters=rope, **common)
    if s.arch == "qwen3":
        return transformers.Qwen3Config(head_dim=s.head_dim, rope_parameters=rope, **common)
    if s.linear_factor:
        rope |= {"rope_type": "linear", "factor": s.linear_factor}
    local = {"rope_type": "default", "rope_theta": s.local_base or 10000.0}
    every = s.pattern or 6
    kinds = ("sliding_attention", "full_attention")
    return transformers.Gemma3TextConfig(
        head_dim=s.head_dim,
        query_pre_attn_scalar=s.head_dim,
        sliding_window=s.window,
        layer_types=[kinds[layer % every == every - 1] for layer in range(s.layers)],
        rope_parameters={"full_attention": rope, "sliding_attention": local},
        **common,
    )


def state_dict(s: models.Spec) -> dict[str, torch.Tensor]:
    """The model's parameters as transformers names and lays them out."""
    state = {}
    for name, (qtype, packed) in models.tensors(s.name).items():
        weight = dequantize64(packed, qtype)
        if name == "rope_freqs.weight":
            continue  # transformers works the divisors out from the configuration
        if s.arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = halves_from_pairs(weight, s.head_dim)
        if s.arch == "gemma3" and name.endswith("norm.weight"):
            weight = weight - 1.0
        state[hf_name(s.arch, name)] = torch.from_numpy(weight.astype(np.float32))
    if s.output_type is None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def halves_from_pairs(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Order each head's rows for rotation of (i, i + half), the file's being for (2i, 2i + 1)."""
    heads = np.arange(0, len(weight), head_dim)[:, None]
    even, odd = np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)
    return weight[(heads + np.concatenate([even, odd])).ravel()]


def hf_name(arch: str, name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, role, kind = name.split(".")
    names = GEMMA_NAMES if arch == "gemma3" else LAYER_NAMES
    return f"model.layers.{layer}.{names[role]}.{kind}"


def build(s: models.Spec) -> torch.nn.Module:
    cfg = config(s)
    model = transformers.AutoModelForCausalLM.from_config(cfg, attn_implementation="eager")
    model.load_state_dict(state_dict(s), strict=True)
    return model.float().eval()


@torch.no_grad()
def run(model: torch.nn.Module, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """Prompt, then greedy decoding through the model's cache."""
    out = model(torch.from_numpy(prompt.astype(np.int64))[None], use_cache=True)
    prompt_logits, logits = out.logits[0].numpy(), out.logits[0, -1]
    greedy, decoded = [], []
    for _ in range(STEPS):
        greedy.append(int(logits.argmax()))
        step = torch.tensor([[greedy[-1]]])
        out = model(step, past_key_values=out.past_key_values, use_cache=True)
        logits = out.logits[0, -1]
        decoded.append(logits.numpy())
    return {
        "prompt": prompt,
        "prompt_logits": prompt_logits.astype(np.float32),
        "greedy": np.array(greedy, np.int32),
        "decode_logits": np.stack(decoded).astype(np.float32),
    }


@torch.no_grad()
def check(s: models.Spec, model: torch.nn.Module, result: dict[str, np.ndarray]) -> str:
    """Refuse a model whose logits would make a poor test; say what it is like otherwise."""
    logits = np.concatenate([result["prompt_logits"], result["decode_logits"]])
    ids = np.concatenate([result["prompt"], result["greedy"]])
    # The same ids at once, without a cache and in float64: what rounding and caching cost.
    with watch_routers(model) as routers:
        inputs = torch.from_numpy(ids.astype(np.int64))[None]
        exact = model.double()(inputs, use_cache=False).logits[0]
    tie = largest_tie(routers, getattr(s, "used", 0))
    noise = float(np.abs(exact.numpy() - logits).max())
    top = np.sort(logits[PROMPT - 1 : -1], axis=-1)
    margin = float((top[:, -1] - top[:, -2]).min())
    distinct = len(set(result["greedy"].tolist()))
    controls = set(result["greedy"].tolist()) & set(control_ids(s.arch))
    line = (
        f"{s.name}: logits std {logits.std():.2f}, max {np.abs(logits).max():.1f}, "
        f"{distinct} distinct greedy ids, top-1 margin {margin:.3f}, float32 noise {noise:.1e}"
        + (f", experts' largest tie {tie:.2f}" if routers else "")
    )
    good = margin > 1e-2 and distinct >= 12 and noise < 1e-4 and 1 < logits.std() < 10
    good = good and tie < 0.1
    if not good or controls:
        raise SystemExit(f"{line}\nA poor test: choose another seed. Control ids: {controls}")
    return line


@contextmanager
def watch_routers(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect what the routers of experts say of each token."""
    said: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: said.append(out[0]))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    yield said
    for hook in hooks:
        hook.remove()


def largest_tie(routers: list[torch.Tensor], used: int) -> float:
    """The largest weight of an expert that 16-bit rounding could swap for the next best."""
    largest = 0.0
    for logits in routers:
        best = logits.sort(descending=True).values
        weight = best[:, :used].softmax(dim=-1)[:, -1]
        close = best[:, used - 1] - best[:, used] < 0.05
        largest = max(largest, float((weight * close).max()))
    return largest


def write_twin(family, name: str, folder: Path) -> None:
    """Write the model with all weights in float32, the same values, for other readers to check.

    llama.cpp rounds activations to 8 bits against quantised weights, not against float32 ones.
    """
    twin = {}
    for key, (qtype, packed) in family.tensors(name).items():
        weight = dequantize64(packed, qtype).astype("<f4")
        twin[key] = ("f32", weight.view(np.uint8))
    family.write_model(name, folder / f"{name}.gguf", replace=twin)


#: Where models are described, who builds them in PyTorch, and the file of their logits.
FAMILIES = {
    "logits": (models, build),
    "hybrid": (hybrid, hybrid_torch.build),
    "variants": (variants, variants_torch.build),
}


def make(family, build_model, path: Path, only: str | None) -> None:
    """Run a family's models, or the one named and nothing is written."""
    arrays = {}
    for name in family.MODELS:
        if only not in (None, name):
            continue
        s = family.spec(name)
        rng = np.random.default_rng(1000 + s.seed)
        ordinary = np.setdiff1d(np.arange(SIZE), list(control_ids(s.arch)))
        model = build_model(s)
        result = run(model, rng.choice(ordinary, PROMPT).astype(np.int32))
        print(check(s, model, result))
        result["fingerprint"] = np.uint32(family.fingerprint(name))
        arrays |= {f"{name}/{key}": value for key, value in result.items()}
    if only is None:
        np.savez_compressed(path, **arrays)
        print(f"wrote {path.name}: {path.stat().st_size} bytes, {len(family.MODELS)} models")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the references of the tests.")
    parser.add_argument(
        "--twins", type=Path, metavar="DIR", help="only write float32 twins of the models there"
    )
    parser.add_argument("--only", metavar="NAME", help="only run this model, and write nothing")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    options = parser.parse_args()
    for key in options.families or FAMILIES:
        family, build_model = FAMILIES[key]
        if options.twins:
            for name in family.MODELS:
                write_twin(family, name, options.twins)
        else:
            path = Path(__file__).with_name(f"{key}.npz")
            make(family, build_model, path, options.only)


if __name__ == "__main__":
    main()
