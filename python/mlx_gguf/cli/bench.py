"""``mlx-gguf bench``: how close products come to what the machine's memory allows."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ..progress import Progress
from .text import printable, table

if TYPE_CHECKING:
    from ..bench_report import Report, Row

_TYPES = ("q4_k", "q5_k", "q6_k", "q8_0", "iq4_xs")

DESCRIPTION = """\
Multiply random weights with standard normal activations, check every result that was timed against
float64, and print one table.

Weights are distinct arrays of 512 MiB in all, taken in turns, so they come from memory. One sample
is one evaluation of as many products, each with weights of its own, as take about 20 ms, divided by
their number: starting one is not what is measured. (On CUDA, where they are many, several have the
same weights, one after all others.) "time / floor" compares it with a pass over as many bytes that
reads them and does nothing else (on CUDA with a gigabyte's, in proportion), made right before each
sample, since the speed of memory changes on shared machines; ggml takes turns with ours. Figures
are medians.

GB/s and flop/byte count the bytes of the weights alone; x and the result stay in caches. The error
is ||y - ref|| / ||ref|| with the kernel's own weights, and includes rounding to the dtype of x.
The exit code is 1 if a result is wrong."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure products against the speed of memory",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, for this command and for benchmarks/gemv.py."""
    add = parser.add_argument
    add("--backend", help="where products run (default: the default device's)")
    add("--types", nargs="+", default=_TYPES, metavar="TYPE",
        help=f"tensor types (default: {' '.join(_TYPES)})")  # fmt: skip
    add("--shapes", nargs="+", default=("4096x4096",), metavar="NxK",
        help="rows of the weights, and weights in one (default: 4096x4096)")  # fmt: skip
    add("--rows", nargs="+", type=_count, default=(1,), metavar="M",
        help="rows of x (default: 1, which is decoding)")  # fmt: skip
    add("--dtype", nargs="+", default=(), choices=("float32", "float16", "bfloat16"),
        metavar="DTYPE", help="of x (default: that of a model loaded on the backend)")  # fmt: skip
    add("--rounds", type=_count, default=7, metavar="N",
        help="samples of each product (%(default)s)")  # fmt: skip
    add("--compare", action="store_true",
        help="measure rivals, too: mx.quantized_matmul with 4 bits, mx.matmul with 16, and ggml "
        "of llama-cpp-python if it is installed; what takes over a second is skipped")  # fmt: skip
    add("--json", metavar="PATH", help="store everything with machine, date and versions")
    add("--plot", metavar="PATH", help="draw the roofline, such as roofline.png (extra: plot)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, store, draw, and return the exit code."""
    from .. import bench
    from ..bench_report import to_json
    from ..roofline import default_backend

    matrices = _matrices(args.types, args.shapes)
    if args.plot:
        from .. import bench_plot

        bench_plot.require()  # before minutes of measuring
    try:
        with Progress("measuring") as progress:
            found = bench.run(
                matrices,
                backend=args.backend or default_backend(),
                rows=args.rows,
                dtypes=args.dtype,
                compare=args.compare,
                rounds=args.rounds,
                report=progress.show,
            )
    except bench.WrongResultError as error:
        print(f"mlx-gguf: error: {printable(str(error))}", file=sys.stderr)
        return 1
    print(text(found))
    if args.json:
        with open(args.json, "w") as out:
            json.dump(to_json(found), out, indent=1)
            out.write("\n")
    if args.plot:
        bench_plot.draw(to_json(found), args.plot)
    return 0


def text(found: Report) -> str:
    """The table, what it holds for, and what was left out."""
    from ..bench_report import circumstances, quartiles

    about = circumstances(found.backend)
    memory = ""
    if found.backend == "cpu":
        memory = f" {about['threads']} threads, {about['page_size']}-byte pages"
        memory += f" (huge: {about['huge_pages']})," if about["huge_pages"] else ","
    header = ("kernel", "weights", "N x K", "M", "x", "us", "GB/s", "time / floor", "flop/byte",
              "GFLOP/s", "error")  # fmt: skip
    peaks = ", ".join(f"{peak:.0f} GFLOP/s ({kind})" for kind, peak in found.peaks.items())
    low, high = quartiles(found.reads)
    parts = [
        f"{found.backend}: {about['device']},{memory} "
        f"MLX {about['mlx']}, mlx-gguf {about['mlx_gguf']}, {about['date']}",
        table(header, [_row(row) for row in found.rows], "<<<><>>>>>>"),
        f"memory   {found.memory_roof:.1f} GB/s (quartiles of this run {low:.1f} and {high:.1f})\n"
        f"compute  {peaks}\n"
        f"ridge    {found.ridge:.1f} flop/byte",
    ]
    if found.skipped:
        parts.append("\n".join(f"skipped: {s.kernel}, {s.case}: {s.reason}" for s in found.skipped))
    return "\n\n".join(parts)


def _row(row: Row) -> tuple[str, ...]:
    return (
        row.kernel,
        row.weights,
        f"{row.N} x {row.K}",
        str(row.M),
        row.dtype,
        f"{1e6 * row.seconds:.1f}",
        f"{row.gb_per_s:.1f}",
        f"{row.over_floor:.2f}",
        f"{row.intensity:.2f}",
        f"{row.gflop_per_s:.1f}",
        f"{row.error:.1e}",
    )


def _matrices(types, shapes):
    from ..tune import matrices_named

    pairs = [f"{qtype}:{shape}" for shape in shapes for qtype in types]
    try:
        return matrices_named(pairs)
    except ValueError as error:
        raise ValueError(str(error).replace("[tune]", "[bench]", 1)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, received {text!r}")
    return int(text)
