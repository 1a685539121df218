"""``mlx-gguf generate``: one prompt, one answer."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..progress import Progress
from .options import (
    add_cache_options,
    add_model_options,
    add_sampling_options,
    first_messages,
    load_model,
    render_chat,
    stream_options,
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="stream a model's answer to a prompt",
        description="Stream a model's answer to a prompt. Options are those of mlx_lm.generate.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--prompt", "-p", default="hello", metavar="TEXT", help="'-' reads standard input"
    )
    parser.add_argument("--prefill-response", metavar="TEXT", help="how the answer begins")
    parser.add_argument(
        "--ignore-chat-template", action="store_true", help="use the prompt as it is"
    )
    parser.add_argument(
        "--verbose",
        type=_boolean,
        metavar="BOOL",
        help="statistics on standard error at the end (default: if it is a terminal)",
    )
    add_sampling_options(parser, max_tokens=100, seed=None)
    add_cache_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Stream the answer."""
    text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    if text == "-":
        text = sys.stdin.read()
    with Progress("starting") as progress:
        model, tokenizer = load_model(args, progress)
        from mlx_lm import stream_generate

        prompt = _prompt_ids(text, tokenizer, args)
        options = stream_options(args, tokenizer, progress)
        for response in stream_generate(
            model, tokenizer, prompt, max_kv_size=args.max_kv_size, **options
        ):
            print(response.text, end="", flush=True)
    print()
    if args.verbose or (args.verbose is None and sys.stderr.isatty()):
        print(_statistics(response), file=sys.stderr)


def _prompt_ids(text: str, tokenizer: Any, args: argparse.Namespace) -> list[int]:
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        ids = tokenizer.encode(text)
    else:
        messages = [*first_messages(args), {"role": "user", "content": text}]
        prefill = args.prefill_response is not None
        if prefill:
            messages.append({"role": "assistant", "content": args.prefill_response})
        ids = render_chat(
            tokenizer,
            messages,
            args,
            continue_final_message=prefill,
            add_generation_prompt=not prefill,
        )
    if not ids:
        raise ValueError("[generate] Expected a prompt of at least one token. Received none.")
    return ids


def _statistics(response: Any) -> str:
    return (
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB"
    )


def _boolean(text: str) -> bool:
    return text.lower() not in ("false", "f")
