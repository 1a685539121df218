"""``mlx-gguf doctor``: whether every kernel is right on this machine."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..progress import Progress
from .text import printable, table

if TYPE_CHECKING:
    from ..doctor import Report, Section, TypeRow

# Failures shown; the rest is counted.
_SHOWN = 40


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check every kernel on this machine",
        description="Compile every kernel that can run here, run each on random weights and "
        "compare with float64 arithmetic. Prints a report to paste into an issue; the exit code "
        "is 1 if anything is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--backend", choices=("cpu", "metal", "cuda"), help="check this one alone (default: all)"
    )
    parser.add_argument(
        "--types", nargs="+", default=(), metavar="TYPE", help="check these alone (default: all)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, print, and return the exit code."""
    from .. import _ext
    from ..doctor import diagnose, to_json
    from ..inspect import is_supported

    for qtype in args.types:
        if not is_supported(qtype):
            known = " ".join(f.name for f in _ext.formats() if f.supported)
            raise ValueError(f"[doctor] Expected types of {known}. Received {qtype!r}.")
    options = {"backends": (args.backend,)} if args.backend else {}
    with Progress("checking") as progress:
        report = diagnose(types=args.types, report=progress.show, **options)
    print(json.dumps(to_json(report), indent=2) if args.json else _text(report))
    return 1 if report.failures else 0


def _text(report: Report) -> str:
    width = max(map(len, report.versions))
    versions = "\n".join(f"{k:<{width}}  {printable(v)}" for k, v in report.versions.items())
    rows = [_row(section, row) for section in report.sections for row in section.types]
    header = ("backend", "type", "checks", "failed", "error f32", "f16", "bf16")
    parts = [versions, table(header, rows, "<<>>>>>")]
    absent = [s for s in report.sections if s.unavailable is not None]
    if absent:
        parts.append("\n".join(f"not checked: {s.name}: {s.unavailable}" for s in absent))
    if report.failures:
        lines = [
            f"FAILED: {f.backend} {f.qtype} {f.dtype} {f.path}: {printable(f.problem)}"
            for f in report.failures[:_SHOWN]
        ]
        if (more := len(report.failures) - _SHOWN) > 0:
            lines.append(f"and {more} more")
        parts.append("\n".join(lines))
    checks = sum(row.checks for section in report.sections for row in section.types)
    parts.append(
        f"{len(report.failures)} of {checks} checks failed"
        if report.failures
        else f"all {checks} checks passed"
    )
    return "\n\n".join(parts)


def _row(section: Section, row: TypeRow) -> tuple[str, ...]:
    errors = (row.errors.get(dtype) for dtype in ("float32", "float16", "bfloat16"))
    cells = ("-" if error is None else f"{error:.1e}" for error in errors)
    return (section.name, row.qtype, str(row.checks), str(row.failed), *cells)
