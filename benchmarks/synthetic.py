"""Opening, loading and running a file of Qwen3.5-4B's tensor table, without its weights.

    python benchmarks/synthetic.py FILE                # writes 2.9 GB
    python benchmarks/synthetic.py FILE --measure      # writes it if need be, and measures

The names, shapes and types are those of a UD-Q4_K_XL file, the blocks are random, with weights of
a size that keeps activations finite; what the model says is noise. Sizes are those of the published
configuration of Qwen3.5-4B (32 layers, of which every fourth has full attention, width 2560,
tied embeddings). Known of the types is which ones each kind of tensor has, not in which layer:
that gate and up are IQ4_XS in every eighth layer and Q5_K in the outer ones, and how Q4_K, Q5_K and
Q6_K alternate in down and in attention, is assumed. So is F16 for alpha and beta. The vocabulary
has as many tokens as the real one and about as many merges, made of pairs and triples of bytes.

Each measurement is a process of its own: cold, after the system was asked to drop the file from
its page cache (where it can be asked: Linux), and warm, right after.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path

# For the random blocks, which only writing needs: a measurement is not to load more than it uses.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

PROMPT = "The capital of France is"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Control and unused tokens at the end of the vocabulary, from <|endoftext|> on.
EXTRA = 276
CHUNK = 16 << 20  # bytes made and written at a time


@dataclass(frozen=True)
class Sizes:
    """The configuration; see config.json of Qwen/Qwen3.5-4B."""

    layers: int = 32
    hidden: int = 2560
    ffn: int = 9216
    vocabulary: int = 248320
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 256
    key_heads: int = 16
    value_heads: int = 32
    state: int = 128
    conv: int = 4
    interval: int = 4


SMALL = Sizes(4, 512, 1024, 4096, heads=4, kv_heads=2, head_dim=128, key_heads=4, value_heads=8)


@dataclass(frozen=True)
class Tensor:
    """A row of the table; `gain` is the size of its output for inputs of size 1."""

    name: str
    qtype: str
    shape: tuple[int, ...]
    gain: float = 1.0


def tensor_table(s: Sizes) -> Iterator[Tensor]:
    """All tensors, in the order of the file."""
    yield Tensor("token_embd.weight", "q6_k", (s.vocabulary, s.hidden))
    yield Tensor("output_norm.weight", "f32", (s.hidden,))
    for i in range(s.layers):
        full = (i + 1) % s.interval == 0
        for t in (*(_attention(s, i) if full else _linear(s)), *_mlp(s, i)):
            yield replace(t, name=f"blk.{i}.{t.name}")


def _attention(s: Sizes, layer: int) -> Iterator[Tensor]:
    more = ("q6_k", "q5_k", "q4_k")[(layer // s.interval) % 3]
    less = "q5_k" if more == "q6_k" else "q4_k"
    inner, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield Tensor("attn_q.weight", less, (2 * inner, s.hidden))
    yield Tensor("attn_k.weight", less, (kv, s.hidden))
    yield Tensor("attn_v.weight", more, (kv, s.hidden))
    yield Tensor("attn_output.weight", more, (s.hidden, inner))
    yield Tensor("attn_q_norm.weight", "f32", (s.head_dim,))
    yield Tensor("attn_k_norm.weight", "f32", (s.head_dim,))


def _linear(s: Sizes) -> Iterator[Tensor]:
    inner = s.value_heads * s.state
    channels = 2 * s.key_heads * s.state + inner
    yield Tensor("attn_qkv.weight", "q5_k", (channels, s.hidden))
    yield Tensor("attn_gate.weight", "q5_k", (inner, s.hidden))
    yield Tensor("ssm_alpha.weight", "f16", (s.value_heads, s.hidden))
    yield Tensor("ssm_beta.weight", "f16", (s.value_heads, s.hidden))
    yield Tensor("ssm_a", "f32", (s.value_heads,))
    yield Tensor("ssm_dt.bias", "f32", (s.value_heads,))
    yield Tensor("ssm_conv1d.weight", "f32", (channels, s.conv))
    yield Tensor("ssm_norm.weight", "f32", (s.state,))
    yield Tensor("ssm_out.weight", "q8_0", (s.hidden, inner), 0.3)


def _mlp(s: Sizes, layer: int) -> Iterator[Tensor]:
    outer = layer < s.layers // 16 or layer >= s.layers - s.layers // 16
    up = "q5_k" if outer else "iq4_xs" if layer % 8 == 4 else "q4_k"
    down = "q6_k" if outer or layer % 8 == 7 else ("q4_k", "q5_k")[layer % 2]
    yield Tensor("attn_norm.weight", "f32", (s.hidden,))
    yield Tensor("post_attention_norm.weight", "f32", (s.hidden,))
    yield Tensor("ffn_gate.weight", up, (s.ffn, s.hidden))
    yield Tensor("ffn_up.weight", up, (s.ffn, s.hidden))
    yield Tensor("ffn_down.weight", down, (s.hidden, s.ffn), 0.5)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor in the file."""
    from blocks import row_bytes

    *outer, K = tensor.shape
    return row_bytes(tensor.qtype, K) * (outer[0] if outer else 1)


def write(path: Path, s: Sizes) -> None:
    """Write the file, a few rows at a time."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    writer = GGUFWriter(path, "qwen35")
    writer.add_name("Qwen3.5 4B synthetic" if s == Sizes() else "Qwen3.5 synthetic")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_block_count(s.layers)
    writer.add_context_length(262144)
    writer.add_embedding_length(s.hidden)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(s.head_dim // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(s.conv)
    writer.add_ssm_state_size(s.state)
    writer.add_ssm_group_count(s.key_heads)
    writer.add_ssm_time_step_rank(s.value_heads)
    writer.add_ssm_inner_size(s.value_heads * s.state)
    writer.add_full_attention_interval(s.interval)
    _add_vocabulary(writer, s.vocabulary)
    tensors = list(tensor_table(s))
    for t in tensors:
        size = nbytes(t)
        rows = t.shape[:-1]
        row = size // (rows[0] if rows else 1)
        raw = GGMLQuantizationType[t.qtype.upper()]
        writer.add_tensor_info(t.name, (*rows, row), np.dtype(np.uint8), size, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    rng = np.random.default_rng(35)
    for t in tensors:
        for part in _data(t, rng):
            out.write(part.tobytes())
        writer.write_padding(out, nbytes(t))
    out.flush()
    os.fsync(out.fileno())
    writer.close()


def _data(t: Tensor, rng) -> Iterator:
    """The bytes of a tensor, in pieces."""
    import numpy as np

    from blocks import random_blocks

    if t.qtype == "f32":
        if t.name.endswith("ssm_a"):
            values = -np.exp(rng.uniform(np.log(0.05), 0, t.shape))
        elif "ssm_conv1d" in t.name:
            values = rng.normal(0, 0.6, t.shape)
        elif t.name.endswith("bias"):
            values = rng.uniform(-1, 1, t.shape)
        else:
            values = rng.uniform(0.8, 1.2, t.shape)
        yield values.astype("<f4")
        return
    rows, K = t.shape
    size = t.gain * K**-0.5
    step = max(1, CHUNK * rows // nbytes(t))
    for first in range(0, rows, step):
        n = min(step, rows - first)
        yield random_blocks(t.qtype, n, K, rng, size=(0.7 * size, 1.4 * size))


def _add_vocabulary(writer, size: int) -> None:
    from gguf import TokenType

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    pairs = [a + b for a, b in product(letters, letters)]
    longer = [*product(letters, letters), *product(pairs, letters[:64])]
    merges = list(islice(longer, size - EXTRA - len(letters)))
    tokens = letters + [a + b for a, b in merges]
    first = len(tokens)
    extra = [*CONTROL, *(f"[PAD{i}]" for i in range(first + len(CONTROL), size))]
    types = [TokenType.NORMAL] * first + [TokenType.CONTROL] * len(CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens + extra)
    writer.add_token_types(types + [TokenType.UNUSED] * (size - len(types)))
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_eos_token_id(first + 2)
    writer.add_pad_token_id(first)
    writer.add_add_bos_token(False)


def measure(path: Path, tokens: int) -> dict:
    """Measure in fresh processes, on every backend there is."""
    import mlx.core as mx

    there = {"metal": mx.metal.is_available, "cuda": mx.cuda.is_available}
    runs = []
    for backend in ("cpu", *(name for name, here in there.items() if here())):
        for cache in ("cold", "warm"):
            if cache == "cold" and not _drop_from_page_cache(path):
                continue
            command = [sys.executable, __file__, str(path), "--one", backend]
            done = subprocess.run(
                [*command, "--tokens", str(tokens)], stdout=subprocess.PIPE, text=True, check=True
            )
            runs.append({"backend": backend, "page_cache": cache, **json.loads(done.stdout)})
    packages = ("mlx", "mlx-lm", "mlx-gguf", "transformers")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"processor": _processor(), "cores": os.cpu_count()},
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "file_bytes": path.stat().st_size,
        "prompt": PROMPT,
        "runs": runs,
    }


def measure_here(path: str, backend: str, tokens: int) -> dict:
    """Measure in this process: open, load, prompt and decode."""
    clock = time.perf_counter
    start = clock()
    import mlx.core as mx
    import mlx_lm

    import mlx_gguf as gg

    mx.set_default_device(mx.cpu if backend == "cpu" else mx.gpu)
    imported = clock()
    file = gg.open(path)
    opened = clock()
    del file
    model, tokenizer = gg.load(path)
    loaded = clock()
    rss_loaded = _memory()
    prompt = tokenizer.encode(PROMPT)
    times = []
    for _ in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=tokens + 1):
        times.append(clock())
    return {
        "import_s": imported - start,
        "open_s": opened - imported,
        "load_s": loaded - opened,
        "prompt_tokens": len(prompt),
        "prompt_s": times[0] - loaded,
        "first_token_s": times[0] - opened,
        "decoded_tokens": len(times) - 1,
        "decode_tokens_per_s": (len(times) - 1) / (times[-1] - times[0]),
        "loaded": rss_loaded,
        "done": _memory(),
    }


def _memory() -> dict[str, int | None]:
    """Bytes: the most that ever was resident, and what of it now is not the file's pages."""
    if sys.platform == "darwin":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_rss": peak, "anonymous_rss": None}
    # Not getrusage, which on Linux starts with the peak of the parent process.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {key: int(status[key].split()[0]) for key in ("VmHWM", "RssAnon")}
    return {"peak_rss": kib["VmHWM"] << 10, "anonymous_rss": kib["RssAnon"] << 10}


def _drop_from_page_cache(path: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _processor() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def show(report: dict) -> None:
    """Print the table."""
    machine = report["machine"]
    size = report["file_bytes"] / 1e9
    print(f"{machine['processor']}, {machine['cores']} cores; file of {size:.2f} GB")
    header = ("backend", "cache", "open ms", "load s", "first token s", "tok/s", "peak RSS GB",
              "of it not file GB")  # fmt: skip
    print("  ".join(header))
    for run in report["runs"]:
        memory = run["done"]
        anonymous = memory["anonymous_rss"]
        cells = (
            run["backend"],
            run["page_cache"],
            f"{1e3 * run['open_s']:.1f}",
            f"{run['load_s']:.2f}",
            f"{run['first_token_s']:.2f}",
            f"{run['decode_tokens_per_s']:.2f}",
            f"{memory['peak_rss'] / 1e9:.2f}",
            "-" if anonymous is None else f"{anonymous / 1e9:.2f}",
        )
        print("  ".join(f"{c:>{len(h)}}" for c, h in zip(cells, header, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("file", type=Path, help="the .gguf file to write, or to measure if it is there")
    add("--layers", type=int, metavar="N", help="instead of 32")
    add("--small", action="store_true", help="small sizes and vocabulary, for tests")
    add("--measure", action="store_true", help="measure, and print a table")
    add("--tokens", type=int, default=8, metavar="N", help="to decode (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the measurements there too")
    add("--one", metavar="BACKEND", help="measure in this process alone, and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_here(str(args.file), args.one, args.tokens)))
        return
    sizes = SMALL if args.small else Sizes()
    sizes = replace(sizes, layers=args.layers) if args.layers else sizes
    if not args.measure or not args.file.exists():
        write(args.file, sizes)
        print(f"{args.file}: {args.file.stat().st_size:,} bytes")
    if args.measure:
        report = measure(args.file, args.tokens)
        show(report)
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
