"""A model's decode on CUDA: random Q4_K weights against MLX's own 4-bit, in one run.

    python benchmarks/cuda_decode.py --json results.json --profile
    python benchmarks/cuda_decode.py --layers 4             # a quick look
    python benchmarks/cuda_decode.py --model qwen3.5
    python benchmarks/cuda_decode.py --model qwen3.5-moe --layers 40

mlx-lm's classes in the sizes of Llama 3 8B, Qwen3.5 9B or 35B-A3B, with our layers on random Q4_K
blocks (a token's layers in one operation, as loading does it; called one by one and fused; and
those apart) and with MLX's quantised layers of groups of 64 and of 32. Decoding goes through
mlx-lm's generate_step; the contenders take turns and figures are medians. First the logits are
compared with those of the same weights written out in float32. Where a token's time goes is asked
of the host's clock and, with --profile, of PyTorch's profiler, which sees every kernel of the
process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models import gated_delta as mlx_gated_delta
from mlx_lm.models import llama, qwen3_5
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_gguf as gg
from mlx_gguf import gated_delta
from mlx_gguf.fused import fuse
from mlx_gguf.nn import QuantEmbedding, QuantLinear, QuantSwitchLinear
from mlx_gguf.progress import Progress
from mlx_gguf.step import install

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from blocks import random_blocks

QTYPE = "q4_k"
OURS, FUSED, APART = (f"mlx-gguf Q4_K{way}" for way in ("", ", no step", ", apart"))
PROMPT = list(range(1, 9))
WARM, LONG = 16, 2048


SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
    "qwen3.5": {
        "model_type": "qwen3_5",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 248320,
        "tie_word_embeddings": False,
    },
}
SIZES["qwen3.5-moe"] = {
    **SIZES["qwen3.5"],
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
NORMS = (nn.RMSNorm, qwen3_5.RMSNormGated)
OURS_OF = (QuantLinear, QuantEmbedding, QuantSwitchLinear)


def empty_model(name: str, layers: int) -> Any:
    module = llama if name == "llama" else qwen3_5
    model = module.Model(module.ModelArgs.from_dict({**SIZES[name], "num_hidden_layers": layers}))
    for part in model.modules():
        if isinstance(part, qwen3_5.GatedDeltaNet):
            channels, taps, _ = part.conv1d.weight.shape
            part.conv1d.weight = mx.random.uniform(-0.5, 0.5, (channels, taps, 1))
            part.A_log = mx.random.uniform(-1, 1, part.A_log.shape)
    return model


@cache
def random_rows(K: int) -> mx.array:
    size = (0.7 * K**-0.5, 1.4 * K**-0.5)
    return mx.array(random_blocks(QTYPE, 1024, K, np.random.default_rng(K), size=size))


def random_weight(N: int, K: int) -> mx.array:
    """1,024 random rows again and again, in memory of its own."""
    weight = mx.concatenate([random_rows(K)] * -(-N // 1024))[:N] + mx.array(0, mx.uint8)
    mx.eval(weight)
    return weight


def our_model(name: str, layers: int, dtype: mx.Dtype, progress: Progress) -> Any:
    model = empty_model(name, layers)
    made = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, SwitchLinear)):
            progress.show(f"random weights: {name}")
            *experts, N, K = module.weight.shape
            weight = random_weight(math.prod([*experts, N]), K)
            if isinstance(module, SwitchLinear):
                weight = weight.reshape(*experts, N, -1)
                made.append((name, QuantSwitchLinear.from_packed(weight, QTYPE)))
            elif isinstance(module, nn.Linear):
                made.append((name, QuantLinear.from_packed(weight, QTYPE)))
            else:
                made.append((name, QuantEmbedding.from_packed(weight, QTYPE, dtype)))
    model.update_modules(tree_unflatten(made))
    return finished(model, dtype)


def mlx_model(name: str, layers: int, dtype: mx.Dtype, group_size: int, progress: Progress) -> Any:
    model = empty_model(name, layers)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, SwitchLinear)):
            module.weight = module.weight.astype(dtype)
    progress.show(f"quantising by MLX, groups of {group_size}")
    nn.quantize(model, group_size=group_size, bits=4)
    for layer in model.layers:  # one after the other: whole in 16 bits they take 16 GB
        mx.eval(layer.parameters())
    return finished(model, dtype)


def finished(model: Any, dtype: mx.Dtype) -> Any:
    for module in model.modules():
        if isinstance(module, (*NORMS, nn.Conv1d)):
            module.weight = module.weight.astype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def dense_twin(name: str, layers: int, model: Any) -> Any:
    """The same weights as float32 numbers."""
    twin = empty_model(name, layers)
    made = []
    for name, module in model.named_modules():
        if isinstance(module, OURS_OF):
            made.append((f"{name}.weight", gg.dequantize(module.weight, QTYPE, mx.float32)))
        elif isinstance(module, (*NORMS, nn.Conv1d)):
            made.append((f"{name}.weight", module.weight.astype(mx.float32)))
        elif isinstance(module, qwen3_5.GatedDeltaNet):
            made += [(f"{name}.{key}", module[key]) for key in ("A_log", "dt_bias")]
    twin.load_weights(made)
    return twin


def logits_error(name: str, dtype: mx.Dtype, progress: Progress) -> dict[str, float]:
    """Relative errors of a small model's logits, for one row after the other, 8 and 256."""
    model = our_model(name, 4, dtype, progress)
    progress.show("comparing logits")
    ids = mx.array([[i % 1000 for i in range(1, 257)]])
    ref = dense_twin(name, 4, model)(ids).astype(mx.float32)
    fuse(model)
    install(model)
    past = make_prompt_cache(model)
    few = [model(ids[:, i : i + 1], cache=past) for i in range(256)]
    error = {}
    for name, y in (
        ("1 row each", mx.concatenate(few, 1)),
        ("8 rows", model(ids[:, :8])),
        ("256 rows", model(ids)),
    ):
        want = ref[:, : y.shape[1]]
        difference = mx.linalg.norm((y.astype(mx.float32) - want).flatten())
        error[name] = (difference / mx.linalg.norm(want.flatten())).item()
    return error


def tokens(model: Any, prompt: list[int], count: int) -> Iterator[int]:
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
        yield int(token)


def decode_seconds(model: Any, count: int) -> float:
    """Seconds a token, after some."""
    start = 0.0
    for i, _ in enumerate(tokens(model, PROMPT, WARM + count), 1):
        if i == WARM:
            start = time.perf_counter()
    return (time.perf_counter() - start) / count


def prompt_seconds(model: Any) -> float:
    start = time.perf_counter()
    next(tokens(model, PROMPT * (LONG // len(PROMPT)), 1))
    return time.perf_counter() - start


def host_ms(model: Any, count: int = 20) -> dict[str, float]:
    """Milliseconds a token of the host: Python, encoding, and waiting for the device after it."""
    past = make_prompt_cache(model)
    token = mx.array([PROMPT])
    parts: dict[str, list[float]] = {"build": [], "encode": [], "wait": []}
    for _ in range(count):
        moments = [time.perf_counter()]
        token = mx.argmax(model(token, cache=past)[:, -1:], -1)
        moments.append(time.perf_counter())
        mx.async_eval(token)
        moments.append(time.perf_counter())
        mx.synchronize()
        moments.append(time.perf_counter())
        for name, a, b in zip(parts, moments, moments[1:], strict=False):
            parts[name].append(1e3 * (b - a))
    return {name: statistics.median(times[5:]) for name, times in parts.items()}


def kernel_profile(model: Any, count: int = 20) -> list[dict[str, Any]]:
    """The kernels of a token by their time, from PyTorch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1).cuda()
    stream = tokens(model, PROMPT, 10 * WARM + count)
    for _ in range(WARM):
        next(stream)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(count):
            next(stream)
        mx.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.removeprefix("void ").split("(")[0]
            found.setdefault(name, []).append(event.self_device_time_total)
    rows = [
        {"kernel": name, "launches": len(us) / count, "us": sum(us) / count}
        for name, us in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def nbytes(model: Any) -> int:
    """Bytes of weights that a token reads: all but embeddings and experts it does not go to."""
    parameters: Any = tree_flatten(model.parameters())
    total = 0
    for name, a in parameters:
        if "switch_mlp" in name and a.ndim == 3:
            total += a.nbytes * SIZES["qwen3.5-moe"]["num_experts_per_tok"] // a.shape[0]
        elif "embed_tokens" not in name:
            total += a.nbytes
    return total


def same(other: Any, name: str, layers: int, apart: bool = False) -> Any:
    """A model of the same weights, perhaps with a product each."""
    model = empty_model(name, layers)
    made = []
    for name, module in other.named_modules():
        if isinstance(module, QuantLinear) and apart:
            made.append((name, QuantLinear.from_packed(module.weight, QTYPE)))
        elif isinstance(module, (*OURS_OF, nn.Conv1d, *NORMS)):
            made.append((name, module))
    model.update_modules(tree_unflatten(made))
    model.eval()
    return model


def contenders(args: argparse.Namespace, dtype: mx.Dtype, progress: Progress) -> dict[str, Any]:
    of = args.model, args.layers
    ours = our_model(*of, dtype, progress)
    fuse(ours)
    out = {OURS: ours, FUSED: same(ours, *of), APART: same(ours, *of, apart=True)}
    install(ours)
    for group_size in args.group_sizes:
        name = f"MLX 4-bit, groups of {group_size}"
        out[name] = mlx_model(*of, dtype, group_size, progress)
    return out


@contextmanager
def own_operations(name: str) -> Iterator[None]:
    """mlx-lm's own gated delta rule for MLX's layers."""
    if name.startswith("MLX"):
        mlx_gated_delta.gated_delta_ops = gated_delta._mlx_gated_delta_ops
    yield
    gated_delta.install()


def memory_of_prompt(model: Any) -> tuple[float, float]:
    """Seconds to read a long prompt, and the bytes it takes beside what was there."""
    prompt_seconds(model)  # compiles
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    seconds = prompt_seconds(model)
    return seconds, mx.get_peak_memory() - before


def summary(model: Any, seconds: list[float], args: argparse.Namespace) -> dict[str, Any]:
    """All figures of a contender, given its seconds a token in every round."""
    middle = statistics.median(seconds)
    out: dict[str, Any] = {
        "decode_tokens_per_s": 1 / middle,
        "decode_ms": [1e3 * s for s in seconds],
        "weights_gb_per_s": nbytes(model) / middle / 1e9,
        "host_ms": host_ms(model),
    }
    head = getattr(model, "language_model", model).lm_head
    if isinstance(head, QuantLinear):  # MLX compiles its own for minutes
        prompt, extra = memory_of_prompt(model)
        out |= {"prompt_tokens_per_s": LONG / prompt, "prompt_extra_gb": extra / 1e9}
    if args.profile:
        out["kernels"] = kernel_profile(model)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=SIZES, default="llama", help="whose sizes (%(default)s)")
    add("--layers", type=int, default=32, metavar="N", help="(%(default)s)")
    add("--tokens", type=int, default=100, metavar="N", help="to decode (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="measurements of each (%(default)s)")
    add("--dtype", choices=("float16", "bfloat16"), default="float16", help="(%(default)s)")
    add("--group-sizes", type=int, nargs="*", default=[64, 32], metavar="N", help="of MLX's")
    add("--profile", action="store_true", help="list the kernels of a token (needs PyTorch)")
    add("--json", type=Path, metavar="PATH", help="store the result")
    args = parser.parse_args()
    dtype = getattr(mx, args.dtype)
    with Progress("measuring") as progress:
        gated_delta.install()
        errors = logits_error(args.model, dtype, progress)
        models = contenders(args, dtype, progress)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for round_ in range(args.rounds):
            for name, model in models.items():
                progress.show(f"{name}, round {round_ + 1} of {args.rounds}")
                with own_operations(name):
                    seconds[name].append(decode_seconds(model, args.tokens))
        results = {}
        for name, model in models.items():
            progress.show(f"{name}: where the time goes")
            with own_operations(name):
                results[name] = summary(model, seconds[name], args)
    show(results, errors, args)
    if args.json:
        stored = circumstances(args) | {"logits_error": errors, "results": results}
        args.json.write_text(json.dumps(stored, indent=1) + "\n")


def show(results: dict[str, Any], errors: dict[str, float], args: argparse.Namespace) -> None:
    print("logits against float32: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    ours = results[OURS]["decode_tokens_per_s"]
    print(f"{'':26}{'tokens/s':>10}{'ms':>8}{'GB/s':>8}{'faster':>8}{'prompt':>9}{'GB more':>9}"
          f"{'build':>8}{'encode':>8}{'wait':>8}")  # fmt: skip
    for name, r in results.items():
        host = r["host_ms"]
        prompt = (
            f"{r['prompt_tokens_per_s']:9.0f}{r['prompt_extra_gb']:9.2f}"
            if "prompt_extra_gb" in r
            else f"{'-':>9}{'-':>9}"
        )
        print(
            f"{name:26}{r['decode_tokens_per_s']:10.1f}{1e3 / r['decode_tokens_per_s']:8.3f}"
            f"{r['weights_gb_per_s']:8.0f}{ours / r['decode_tokens_per_s']:8.2f}{prompt}"
            f"{host['build']:8.3f}{host['encode']:8.3f}{host['wait']:8.3f}"
        )
    for name, r in results.items():
        for row in r.get("kernels", [])[:16]:
            print(f"{name}: {row['launches']:6.1f} {row['us']:9.1f} us  {row['kernel'][:90]}")


def circumstances(args: argparse.Namespace) -> dict[str, Any]:
    info = {k: v for k, v in gg._ext.cuda_info().items() if "/" not in v}
    driver = Path("/proc/driver/nvidia/version")
    return {
        "date": datetime.date.today().isoformat(),
        "device": str(mx.device_info(mx.gpu).get("device_name")),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "cuda": info,
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm", "mlx-gguf")},
        "options": {k: v for k, v in vars(args).items() if k != "json"},
    }


if __name__ == "__main__":
    main()
