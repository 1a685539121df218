"""How fast a GGUF file loads, reads a prompt and decodes, and what memory it takes.

    python benchmarks/decode.py [FILE] [--prompt-tokens 512] [--tokens 64] [--json PATH]

The greedy continuation of a reference prompt is printed, so that what is timed can be seen
to be right. Without FILE the demo model is used.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from datetime import date

import mlx.core as mx
from mlx_lm import stream_generate

import mlx_gguf as gg
from mlx_gguf import _ext
from mlx_gguf.demo import demo_model
from mlx_gguf.plans import device_name
from mlx_gguf.roofline import bytes_per_token, read_floor

PROMPT = "The capital of France is"


def peak_rss_mb() -> float:
    """Largest resident set so far, mapped file pages included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def measure(path: str, prompt_tokens: int, tokens: int) -> dict[str, float | str]:
    """Measure one file in this process."""
    start = time.perf_counter()
    model, tokenizer = gg.load(path)
    load = time.perf_counter() - start
    text = ""
    for response in stream_generate(model, tokenizer, PROMPT, max_tokens=tokens):
        text += response.text
    decode = response.generation_tps
    words = tokenizer.encode(PROMPT)
    prompt = (words * (prompt_tokens // len(words) + 1))[:prompt_tokens]
    mx.synchronize()
    response = next(iter(stream_generate(model, tokenizer, prompt, max_tokens=1)))
    peak = peak_rss_mb()
    floor = read_floor()
    gbps = decode * bytes_per_token(gg.open(path)) / 1e9
    return {
        "text": text,
        "load_s": load,
        "decode_tokens_per_s": decode,
        "prompt_tokens_per_s": response.prompt_tps,
        "peak_rss_mb": peak,
        "weights_gb_per_s": gbps,
        "read_floor_gb_per_s": floor,
        "floor_over_weights": floor / gbps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="a .gguf file (default: the demo model)")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", metavar="PATH", help="store the result with its circumstances")
    args = parser.parse_args()

    path = args.file or demo_model()
    result = measure(path, args.prompt_tokens, args.tokens)
    print(f"{PROMPT}{result['text']}\n")
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:<22}{value:10.2f}")
    if args.json:
        circumstances = {
            "date": date.today().isoformat(),
            "model": gg.open(path).metadata.get("general.name"),
            "prompt_tokens": args.prompt_tokens,
            "tokens": args.tokens,
            "device": device_name("cpu"),
            "threads": _ext.cpu_threads(),
            "system": platform.system(),
            "mlx": _ext.running_mlx,
            "mlx_gguf": gg.__version__,
        }
        with open(args.json, "w") as out:
            json.dump(circumstances | result, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
