"""Greedy continuations of the demo models, and the command line as a process."""

from __future__ import annotations

import subprocess
import sys

PROMPT = "The capital of France is"

# Greedy ids after PROMPT from weights dequantised to float32 and run by mlx-lm, up to the stop
# token.
GEMMA_IDS = [
    506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488, 3207, 528, 7001, 532,
    506, 1855, 7488, 3207, 528, 3879, 236761, 1030, 563, 5628, 528, 506, 6029, 529, 506, 2891,
]  # fmt: skip
SMOLLM2_IDS = [
    7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216,
    33, 34, 42, 33, 34, 42, 37, 35, 30,
]  # fmt: skip


def text_of(ids, tokens):
    """The text of token ids, from the file's own list of tokens."""
    text = "".join(tokens[i] for i in ids)
    for mark, meaning in (("▁", " "), ("Ġ", " "), ("Ċ", "\n")):
        text = text.replace(mark, meaning)
    return text


def command(*args):
    return [sys.executable, "-m", "mlx_gguf.cli", *args]


def run(*args, **kwargs):
    """Run ``mlx-gguf`` with all streams piped."""
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=120, **kwargs)
