"""How fast a GGUF file loads, reads a prompt and decodes, and what memory it takes.

    python benchmarks/decode.py                        # the demo model
    python benchmarks/decode.py FILE --compare         # beside llama.cpp (llama-cpp-python)
    python benchmarks/decode.py FILE --openblas        # MLX's own products by OpenBLAS, too
    python benchmarks/decode.py FILE --json PATH       # with machine, date and versions

Every measurement is a process of its own, all take turns, and figures are medians, so that neither
memory nor threads mix and all see the same moments of the machine. Each loads the file, decodes
greedily after a short prompt without stopping at an end-of-text token, and reads a long prompt.
llama.cpp gets the same file, as many threads and the defaults of llama-cpp-python.

MLX's wheel for Linux brings a reference BLAS for what is no product of ours, such as attention; it
calls `cblas_sgemm`, so a preloaded OpenBLAS that has a function of that name takes its place.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import datetime
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

PROMPT = "The capital of France is"
OURS, OPENBLAS, LLAMA = "mlx-gguf", "mlx-gguf, OpenBLAS", "llama.cpp"
ROWS = {
    "load_s": "load, s",
    "first_token_s": "load to first token, s",
    "prompt_tokens_per_s": "prompt of {prompt_tokens}, tokens/s",
    "decode_tokens_per_s": "decode of {tokens}, tokens/s",
    "weights_gb_per_s": "weights, GB/s",
    "read_floor_gb_per_s": "reading alone, GB/s",
    "floor_over_weights": "reading alone / weights",
    "peak_rss_mb": "peak RSS, MB",
}


# One measurement, in a process of its own


def peak_rss_mb() -> float:
    """Largest resident set of this program so far, mapped file pages included."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent had when it forked
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def time_tokens(tokens: Iterator[int]) -> tuple[list[int], float, float]:
    """The tokens, the moment of the first, and tokens a second after it."""
    ids, moments = [], []
    for token in tokens:
        ids.append(token)
        moments.append(time.perf_counter())
    return ids, moments[0], (len(ids) - 1) / (moments[-1] - moments[0])


def repeated(ids: list[int], count: int) -> list[int]:
    return (ids * (count // len(ids) + 1))[:count]


def measure_ours(path: str, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    import mlx_gguf as gg
    from mlx_gguf.roofline import bytes_per_token, read_floor

    def generate(ids: list[int], count: int) -> Iterator[int]:
        for token, _ in generate_step(mx.array(ids), model, max_tokens=count):
            yield int(token)

    start = time.perf_counter()
    model, tokenizer = gg.load(path)
    load = time.perf_counter() - start
    words = tokenizer.encode(PROMPT)
    ids, first, decode = time_tokens(generate(words, tokens))
    prompt = repeated(words, prompt_tokens)
    begin = time.perf_counter()
    next(generate(prompt, 1))
    read = time.perf_counter() - begin
    peak = peak_rss_mb()
    return {
        "text": tokenizer.decode(ids),
        "load_s": load,
        "first_token_s": first - start,
        "prompt_tokens_per_s": len(prompt) / read,
        "decode_tokens_per_s": decode,
        "peak_rss_mb": peak,
        "read_floor_gb_per_s": read_floor(),
        "bytes_per_token": bytes_per_token(gg.open(path)),
    }


def measure_llama(
    path: str, prompt_tokens: int, tokens: int, threads: int, extra_buffers: bool
) -> dict[str, Any]:
    import llama_cpp

    defaults = llama_cpp.llama_model_default_params

    def without_extra_buffers() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    if not extra_buffers:  # Llama has no argument for it
        sys.modules["llama_cpp.llama_cpp"].llama_model_default_params = without_extra_buffers
    start = time.perf_counter()
    model = llama_cpp.Llama(
        path,
        n_ctx=max(prompt_tokens, tokens) + 64,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    load = time.perf_counter() - start
    words = model.tokenize(PROMPT.encode())

    def generate(ids: list[int], count: int) -> Iterator[int]:
        model.reset()
        for i, token in enumerate(model.generate(ids, temp=0.0), 1):
            yield token
            if i == count:
                return

    ids, first, decode = time_tokens(generate(words, tokens))
    prompt = repeated(words, prompt_tokens)
    begin = time.perf_counter()
    next(generate(prompt, 1))
    read = time.perf_counter() - begin
    return {
        "text": model.detokenize(ids).decode(errors="replace"),
        "load_s": load,
        "first_token_s": first - start,
        "prompt_tokens_per_s": len(prompt) / read,
        "decode_tokens_per_s": decode,
        "peak_rss_mb": peak_rss_mb(),
    }


def run_alone(args: argparse.Namespace) -> None:
    """Measure in this process, and print one line of JSON."""
    if args.alone == LLAMA:
        result = measure_llama(
            args.file, args.prompt_tokens, args.tokens, args.threads, not args.no_extra_buffers
        )
    else:
        result = measure_ours(args.file, args.prompt_tokens, args.tokens)
    print(json.dumps(result))


# All of them, in turns


class DiedError(RuntimeError):
    """A measurement's process was ended by a signal."""


def measure(
    what: str, args: argparse.Namespace, environment: dict[str, str], *more: str
) -> dict[str, Any]:
    command = [sys.executable, __file__, args.file, "--alone", what, *more]
    for name in ("prompt_tokens", "tokens", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode < 0:
        raise DiedError(f"{what} was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        sys.exit(f"decode.py: {what} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def find_openblas() -> str | None:
    """A library whose `cblas_sgemm` is MLX's, with 32-bit integers.

    The ones that numpy and scipy bring have other names (scipy_cblas_sgemm64_), so that they
    take nobody's place.
    """
    places = ("*/libopenblas*.so*", "*/lib/libopenblas*.so*")
    found = [str(p) for folder in sys.path for place in places for p in Path(folder).glob(place)]
    if system := ctypes.util.find_library("openblas"):
        found.append(system)
    return next((path for path in found if has_cblas(path)), None)


def has_cblas(path: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(path), "cblas_sgemm")
    except OSError:
        return False


def contenders(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """What to measure, each with its environment."""
    plain = os.environ | {"MLX_GGUF_NUM_THREADS": str(args.threads)}
    out = {OURS: plain}
    if args.openblas:
        path = find_openblas() if args.openblas == "find" else args.openblas
        if path and has_cblas(path):
            threads = {"OPENBLAS_NUM_THREADS": str(args.threads)}
            out[OPENBLAS] = plain | {"LD_PRELOAD": path} | threads
        else:
            print(
                "no OpenBLAS: a libopenblas is needed that can be loaded and has cblas_sgemm, such "
                "as the system's (libopenblas0 in Debian); numpy's and scipy's have other names",
                file=sys.stderr,
            )
    if args.compare:
        try:
            metadata.version("llama-cpp-python")
            out[LLAMA] = plain
        except metadata.PackageNotFoundError:
            print("no llama.cpp: llama-cpp-python is not installed", file=sys.stderr)
    return out


def run_all(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {}
    llama_options: tuple[str, ...] = ()
    for what, environment in [*contenders(args).items()] * args.rounds:
        more = llama_options if what == LLAMA else ()
        try:
            result = measure(what, args, environment, *more)
        except DiedError as error:
            if what != LLAMA or more:
                sys.exit(f"decode.py: {error}")
            # Builds with AMX do that on some virtual machines.
            print(f"{error}; again without its repacked weights", file=sys.stderr)
            llama_options = ("--no-extra-buffers",)
            result = measure(what, args, environment, *llama_options)
        runs.setdefault(what, []).append(result)
    return runs


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians, and how fast weights were read; a floor is measured beside ours alone."""
    floors = [
        r["read_floor_gb_per_s"]
        for results in runs.values()
        for r in results
        if "read_floor_gb_per_s" in r
    ]
    floor = statistics.median(floors)
    nbytes = runs[OURS][0]["bytes_per_token"]
    out = {}
    for what, results in runs.items():
        keys = [key for key in ROWS if key in results[0]]
        medians = {key: statistics.median(r[key] for r in results) for key in keys}
        gbps = medians["decode_tokens_per_s"] * nbytes / 1e9
        out[what] = {"text": results[0]["text"]} | medians | {
            "weights_gb_per_s": gbps,
            "read_floor_gb_per_s": floor,
            "floor_over_weights": floor / gbps,
        }  # fmt: skip
    return out


def table(summary: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    titles = [title.format(**vars(args)) for title in ROWS.values()]
    width = max(map(len, titles))
    lines = [" " * width + "".join(f"  {what:>10}" for what in summary)]
    for key, title in zip(ROWS, titles, strict=True):
        cells = (f"  {result[key]:>{max(10, len(what))}.2f}" for what, result in summary.items())
        lines.append(f"{title:<{width}}{''.join(cells)}")
    return "\n".join(lines)


def circumstances(args: argparse.Namespace) -> dict[str, Any]:
    import mlx_gguf as gg
    from mlx_gguf.bench_report import circumstances
    from mlx_gguf.roofline import default_backend

    return circumstances(default_backend()) | {
        "date": datetime.date.today().isoformat(),
        "model": gg.open(args.file).metadata.get("general.name"),
        "threads": args.threads,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "rounds": args.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", nargs="?", help="a .gguf file (default: the demo model)")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="of the prompt (%(default)s)")
    add("--tokens", type=int, default=64, metavar="N", help="to decode (%(default)s)")
    add("--threads", type=int, default=usable_processors(), metavar="N", help="(%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="measurements of each (%(default)s)")
    add("--compare", action="store_true", help="measure llama-cpp-python, too")
    add("--openblas", nargs="?", const="find", metavar="PATH",
        help="measure with OpenBLAS preloaded, too (default: one that is found)")  # fmt: skip
    add("--json", metavar="PATH", help="store the result with its circumstances")
    add("--alone", choices=(OURS, OPENBLAS, LLAMA), help=argparse.SUPPRESS)
    add("--no-extra-buffers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        return run_alone(args)
    if args.file is None:
        from mlx_gguf.demo import demo_model

        args.file = demo_model()
    runs = run_all(args)
    summary = summarise(runs)
    for what, result in summary.items():
        print(f"{what}: {PROMPT}{result['text']}\n")
    print(table(summary, args))
    if args.json:
        with open(args.json, "w") as out:
            stored = circumstances(args) | {"results": summary, "runs": runs}
            json.dump(stored, out, indent=1)
            out.write("\n")


def usable_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    main()
