"""``mlx-gguf eval``: perplexity on a text, and the distance from a reference."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..progress import Progress
from .text import printable

if TYPE_CHECKING:
    from ..evaluate import Evaluation

_METHOD = """\
The text is tokenised as a whole, without special tokens, and cut into windows of --context
tokens that start --stride tokens apart. Each window begins with the BOS if the model's tokenizer
puts one before a text, and is read from an empty cache. Each token is scored once, in the first
window that holds it; a first token that nothing stands before is not scored. Perplexity is the
exponential of the mean of -log(probability). With --reference, KL(reference || FILE) in nats and
whether both hold the same token to be the likeliest are averaged over the same tokens. The
figures after +- are standard errors.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "eval",
        help="measure a model's perplexity, and its distance from a reference",
        description="Measure a model's perplexity on a text and, against a reference such as the "
        "same model in 16 bits, KL divergence and top-1 agreement token by token.",
        epilog=_METHOD,
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="a .gguf file; any shard of a split set")
    add("--text", required=True, metavar="FILE", help="a UTF-8 text; '-' reads standard input")
    add("--reference", metavar="FILE", help="a .gguf file of the same vocabulary")
    add("--context", type=int, default=512, metavar="N", help="tokens of a window (%(default)s)")
    add("--stride", type=int, metavar="N",
        help="tokens between the starts of windows (default: windows do not overlap)")  # fmt: skip
    add("--max-windows", type=_count, metavar="N", help="stop after this many windows")
    add("--dtype", choices=("float16", "bfloat16", "float32"),
        help="of activations (default: float32 on the CPU, a 16-bit type on a GPU)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    import mlx.core as mx

    from ..evaluate import evaluate, windows
    from ..load import load

    text = _read(args.text)
    dtype = getattr(mx, args.dtype) if args.dtype else None
    with Progress(f"loading {os.path.basename(args.file)}") as progress:
        model, tokenizer = load(args.file, dtype=dtype)
        ids = tokenizer.encode(text, add_special_tokens=False)
        bos = tokenizer.bos_token_id if tokenizer.add_bos_token else None
        parts = windows(ids, context=args.context, stride=args.stride, bos=bos)
        parts = parts[: args.max_windows]
        reference = None
        if args.reference:
            progress.show(f"loading {os.path.basename(args.reference)}")
            reference, other = load(args.reference, dtype=dtype)
            if other.encode(text, add_special_tokens=False) != ids:
                raise ValueError(
                    f"[eval] Expected a reference with the tokens of {args.file!r}. Received "
                    f"{args.reference!r}, which cuts the text into others."
                )

        def show(done: int, total: int) -> None:
            progress.show(f"evaluating: {done} of {total} windows")

        result = evaluate(model, parts, reference=reference, progress=show)
    method = {
        "context": args.context,
        "stride": args.stride or args.context - (bos is not None),
        "bos": bos,
    }
    if args.json:
        report = {"file": args.file, "text": args.text, "reference": args.reference, **method}
        print(json.dumps({**report, **_finite(asdict(result))}, indent=2))
    else:
        print(_report(result, method, args))


def _read(path: str) -> str:
    if path == "-":
        return sys.stdin.read()
    with open(path, encoding="utf-8") as file:
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"[eval] Expected UTF-8 text in {path!r}. Received {error}.") from None


def _report(result: Evaluation, method: dict[str, Any], args: argparse.Namespace) -> str:
    bos = "without BOS" if method["bos"] is None else "with BOS"
    rows = [
        (
            "tokens scored",
            f"{result.tokens:,} in {result.windows:,} windows of {method['context']}, stride "
            f"{method['stride']}, {bos}",
        ),
        ("perplexity", f"{result.perplexity:.4f} +- {result.perplexity_error:.4f}"),
    ]
    if other := result.comparison:
        agreement, error = 100 * other.agreement, 100 * other.agreement_error
        rows += [
            ("reference", printable(args.reference)),
            ("its perplexity", f"{other.perplexity:.4f}"),
            ("KL divergence", f"{other.kl:.6f} +- {other.kl_error:.6f} nats"),
            ("top-1 agreement", f"{agreement:.2f} % +- {error:.2f} %"),
        ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _finite(value: Any) -> Any:
    """JSON has no NaN, which the standard error of a single token is, and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, received {text!r}")
    return int(text)
