"""``mlx-gguf inspect``: what a file holds, as tables or as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..file import open as open_gguf
from ..inspect import describe
from ..models import ARCHITECTURES
from .text import printable, shape, size, table

_VALUE_WIDTH = 80

# Lines of the summary and the metadata they come from, under the architecture's prefix.
_FIGURES = {
    "context": "context_length",
    "layers": "block_count",
    "embedding": "embedding_length",
    "feed-forward": "feed_forward_length",
    "heads": "attention.head_count",
    "key/value heads": "attention.head_count_kv",
    "experts": "expert_count",
    "experts used": "expert_used_count",
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a file holds",
        description="Show a GGUF file's architecture, its tensors and a census of their types. "
        "Any readable file will do, also one that cannot be run.",
    )
    parser.add_argument("file", metavar="FILE", help="a .gguf file; any shard of a split set")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--metadata", action="store_true", help="list the metadata too")
    parser.add_argument("--no-tensors", action="store_true", help="leave out the tensor table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the report."""
    report = describe(open_gguf(args.file), tensors=not args.no_tensors)
    if args.json:
        print(json.dumps(report, indent=2))
        return
    parts = [_summary(report)]
    if args.metadata:
        parts.append(_metadata(report["metadata"]))
    if report.get("tensors"):
        parts.append(_tensors(report))
    parts.append(_census(report))
    print("\n\n".join(parts))


def _summary(report: dict[str, Any]) -> str:
    metadata, arch = report["metadata"], report["architecture"]
    known = "" if arch in tuple(ARCHITECTURES) else " (cannot be loaded)"
    rows = [("file", path) for path in report["paths"]]
    rows += [
        ("size", f"{size(report['file_bytes'])}, GGUF version {report['version']}"),
        ("architecture", f"{_value(arch)}{known}"),
        ("name", _value(report["name"])),
        ("parameters", f"{report['parameters']:,}"),
        ("mix", _mix(report)),
        ("unsupported", "; ".join(report["unsupported"]) or "nothing: architecture and all types"),
    ]
    for label, key in _FIGURES.items():
        if (value := metadata.get(f"{arch}.{key}")) is not None:
            rows.append((label, _value(value)))
    for label, key in (("tokenizer", "model"), ("vocabulary", "tokens")):
        if (value := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            rows.append((label, _value(value)))
    has_template = "tokenizer.chat_template" in metadata
    rows.append(("chat template", "yes" if has_template else "no"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {printable(text)}" for label, text in rows)


def _mix(report: dict[str, Any]) -> str:
    shares = [(row["type"].upper(), 100 * row["share"]) for row in report["types"]]
    parts = [f"{name} {share:.0f} %" if share >= 0.5 else f"{name} <1 %" for name, share in shares]
    return f"{report['mix']['name']}: {', '.join(parts) or 'no tensors'}"


def _metadata(metadata: dict[str, Any]) -> str:
    rows = [(printable(key), _value(value)) for key, value in metadata.items()]
    return table(("metadata", "value"), rows, "<<")


def _tensors(report: dict[str, Any]) -> str:
    supported = {row["type"]: row["supported"] for row in report["types"]}
    rows = [
        (
            printable(row["name"]),
            _type(row["type"], supported[row["type"]]),
            shape(row["shape"]),
            f"{row['bytes']:,}",
        )
        for row in report["tensors"]
    ]
    return table(("tensor", "type", "shape", "bytes"), rows, "<<<>")


def _census(report: dict[str, Any]) -> str:
    rows = [
        (
            _type(row["type"], row["supported"]),
            str(row["tensors"]),
            f"{row['bytes']:,}",
            f"{100 * row['share']:.1f} %",
            f"{row['bits_per_weight']:.2f}",
        )
        for row in report["types"]
    ]
    tensors = sum(row["tensors"] for row in report["types"])
    nbytes, weights = report["tensor_bytes"], report["parameters"]
    bits = f"{8 * nbytes / weights:.2f}" if weights else "-"
    rows.append(("total", str(tensors), f"{nbytes:,}", "100.0 %" if nbytes else "-", bits))
    return table(("type", "tensors", "bytes", "share", "bits per weight"), rows, "<>>>>")


def _type(name: str, supported: bool) -> str:
    return name if supported else f"{name} (unsupported)"


def _value(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, dict):
        return f"{value['length']:,} long {value['type']}"
    # Files hold float32: 7 digits are all there is.
    text = printable(f"{value:.7g}" if isinstance(value, float) else str(value))
    return text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 3] + "..."
