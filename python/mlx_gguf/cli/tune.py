"""``mlx-gguf tune``: measure the plans of a model's products and keep the fastest."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence

from ..progress import Progress
from .text import table


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tune",
        help="measure which kernels are fastest on this machine",
        description="Measure the plans of a model's matrix products on this machine, print the "
        "fastest and store them in the user's cache, where this version finds them from then on. "
        "MLX_GGUF_TUNED=0 in the environment turns stored plans off. Do it on a quiet machine.",
    )
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="a .gguf file; any shard of a split set")
    add("--shapes", nargs="+", default=(), metavar="TYPE:NxK",
        help="matrices to tune for, in place of a file's, such as q4_k:4096x12288")  # fmt: skip
    add("--backend", choices=("cpu", "metal", "cuda"),
        help="(default: the default device's; cuda has nothing to tune yet)")  # fmt: skip
    add("--dtype", choices=("float16", "bfloat16", "float32"),
        help="of activations (default: what loading FILE would take)")  # fmt: skip
    add("--repetitions", type=_count, default=7, metavar="N",
        help="times to measure each plan (%(default)s)")  # fmt: skip
    add("--time-limit", type=float, default=math.inf, metavar="SECONDS",
        help="begin no further matrix after this time (default: none)")  # fmt: skip
    add("--dry-run", action="store_true", help="measure and print, but store nothing")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure, print and store."""
    from .. import plans, tune
    from ..file import open as open_gguf
    from ..roofline import default_backend

    if (args.file is None) == (not args.shapes):
        raise ValueError("[tune] Expected either FILE or --shapes. Received both or neither.")
    file = open_gguf(args.file) if args.file else None
    matrices = tune.matrices_of(file) if file else tune.matrices_named(args.shapes)
    backend = args.backend or default_backend()
    dtype = args.dtype or _default_dtype(file, backend)
    choices: list[tune.Choice] = []
    measured, stored = 0, None
    with Progress("measuring") as progress:
        for found in tune.tune(
            matrices,
            backend=backend,
            dtype=dtype,
            repetitions=args.repetitions,
            time_limit=args.time_limit,
            report=progress.show,
        ):
            choices += found
            measured += 1
            if not args.dry_run:  # one by one: what was found survives an interruption
                stored = str(plans.store(backend, [tune.entry(found, dtype)]))
    device = plans.device_name(backend)
    if args.json:
        report = {
            "backend": backend,
            "device": device,
            "dtype": dtype,
            "choices": [dataclasses.asdict(choice) for choice in choices],
            "left": len(matrices) - measured,
            "stored": stored,
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"{backend}: {device}, {dtype} activations, weights from memory\n")
        print(_table(choices))
        print(f"\nstored in {stored}" if stored else "\nnothing stored")
    if left := len(matrices) - measured:
        print(f"mlx-gguf: {left} of {len(matrices)} matrices left: out of time", file=sys.stderr)
    for choice in choices:
        for plan, problem in choice.rejected.items():
            print(f"mlx-gguf: {choice.matrix}, M={choice.M}: {plan}: {problem}", file=sys.stderr)


def _table(choices: Sequence) -> str:
    rows = [
        (
            c.matrix.qtype,
            f"{c.matrix.N} x {c.matrix.K}",
            str(c.M),
            c.now.removeprefix("gemv "),
            "the same" if c.best == c.now else c.best.removeprefix("gemv "),
            f"{1e6 * c.seconds:.1f}",
            f"{c.matrix.nbytes / c.seconds / 1e9:.1f}",
            f"{c.seconds / c.floor:.2f}",
        )
        for c in choices
    ]
    header = ("type", "N x K", "M", "plan now", "best plan", "us", "GB/s", "time / floor")
    return table(header, rows, "<<><<>>>")


def _default_dtype(file, backend: str) -> str:
    if backend == "cpu":
        return "float32"
    from ..models import ARCHITECTURES, find_architecture

    known = file is not None and file.architecture in tuple(ARCHITECTURES)
    half = not known or find_architecture(file.architecture, file.path).half_range
    return "float16" if half else "bfloat16"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, received {text!r}")
    return int(text)
