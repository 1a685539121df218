"""Options and steps that generate and chat share; names and defaults are mlx-lm's."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ..load import load
from ..progress import Progress


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the file and what is about the whole model."""
    parser.add_argument("file", metavar="FILE", help="a .gguf file; any shard of a split set")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="of activations (default: float32 on the CPU, a 16-bit type on a GPU)",
    )
    parser.add_argument(
        "--extra-eos-token", nargs="+", default=(), metavar="TOKEN", help="more tokens to stop at"
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="for the chat template")
    parser.add_argument(
        "--chat-template-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="arguments of the chat template, such as '{\"enable_thinking\": false}'",
    )


def add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int, seed: int | None
) -> None:
    """Add what decides the next token, and how many there are."""
    add = parser.add_argument
    add("--max-tokens", "-m", type=_token_limit, default=max_tokens, metavar="N",
        help=f"tokens to generate at most (default: {max_tokens}; -1 for no limit)")  # fmt: skip
    for name, kind, default, text in (
        ("temp", float, 0.0, "temperature; 0 always takes the likeliest token"),
        ("top-p", float, 1.0, "sample among the likeliest tokens of this total probability"),
        ("min-p", float, 0.0, "drop tokens below this part of the best one's probability"),
        ("top-k", int, 0, "sample among this many tokens; 0 for all"),
        ("xtc-probability", float, 0.0, "chance of dropping all likely tokens but the last"),
        ("xtc-threshold", float, 0.1, "probability from which XTC calls a token likely"),
        ("min-tokens-to-keep", int, 1, "tokens that min-p never drops"),
        ("seed", int, seed, "of the random numbers"),
    ):
        add(f"--{name}", type=kind, default=default, metavar="N", help=f"{text} (%(default)s)")


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add what is about the key-value cache."""
    add = parser.add_argument
    add("--max-kv-size", type=int, metavar="N", help="tokens the key-value cache keeps at most")
    add("--prefill-step-size", type=int, default=2048, metavar="N",
        help="prompt tokens to process at a time (%(default)s)")  # fmt: skip
    add("--kv-bits", type=int, metavar="N", help="bits to quantise the key-value cache to")
    add("--kv-group-size", type=int, default=64, metavar="N",
        help="its group size (%(default)s)")  # fmt: skip
    add("--quantized-kv-start", type=int, default=5000, metavar="N",
        help="tokens from which on it is quantised (%(default)s)")  # fmt: skip


def load_model(args: argparse.Namespace, progress: Progress) -> tuple[Any, Any]:
    """Load the model and tokenizer that the options describe."""
    import mlx.core as mx

    progress.show(f"loading {os.path.basename(args.file)}")
    dtype = getattr(mx, args.dtype) if args.dtype else None
    model, tokenizer = load(args.file, dtype=dtype)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    if args.seed is not None:
        mx.random.seed(args.seed)
    return model, tokenizer


def stream_options(args: argparse.Namespace, tokenizer: Any, progress: Progress) -> dict[str, Any]:
    """Arguments of ``mlx_lm.stream_generate`` that the options stand for."""
    from mlx_lm.sample_utils import make_sampler

    def prefilled(done: int, total: int) -> None:
        if done < total:
            progress.show(f"reading the prompt: {done} of {total} tokens")
        else:
            progress.clear()

    return {
        "max_tokens": args.max_tokens,
        "sampler": make_sampler(
            args.temp,
            args.top_p,
            args.min_p,
            args.min_tokens_to_keep,
            top_k=args.top_k,
            xtc_probability=args.xtc_probability,
            xtc_threshold=args.xtc_threshold,
            xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
        ),
        "prefill_step_size": args.prefill_step_size,
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "quantized_kv_start": args.quantized_kv_start,
        "prompt_progress_callback": prefilled,
    }


def render_chat(
    tokenizer: Any, messages: list[dict[str, str]], args: argparse.Namespace, **options: Any
) -> list[int]:
    """Token ids of a conversation in the file's chat template."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, **options, **args.chat_template_config
        )
    except TemplateError as error:
        raise ValueError(
            f"[chat_template] Expected messages that the template of {args.file!r} takes. "
            f"Received {error}."
        ) from error
    # The template has written the BOS.
    return tokenizer.encode(text, add_special_tokens=False)


def first_messages(args: argparse.Namespace) -> list[dict[str, str]]:
    """What a conversation starts with."""
    if args.system_prompt is None:
        return []
    return [{"role": "system", "content": args.system_prompt}]


def _token_limit(text: str) -> int:
    if not text.removeprefix("-").isdecimal() or int(text) == 0 or int(text) < -1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, or -1, received {text!r}")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, received {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, received {text!r}")
    return value
