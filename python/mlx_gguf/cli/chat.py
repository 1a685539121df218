"""``mlx-gguf chat``: a conversation that keeps its key-value cache."""

from __future__ import annotations

import argparse
import sys

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

_HELP = "q: quit, r: start over, h: this help; Ctrl-C stops an answer"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model, a line at a time. Options are those of mlx_lm.chat and "
        f"mlx_lm.generate. {_HELP}.",
    )
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=256, seed=0)
    add_cache_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Talk until the user quits or the input ends."""
    with Progress("starting") as progress:
        conversation = Conversation(args, progress)
        progress.clear()
        _note(_HELP)
        while (line := _read_line()) not in (None, "q"):
            if line == "h":
                _note(_HELP)
            elif line == "r":
                conversation.reset()
                _note("started over")
            elif line:
                conversation.ask(line)


class Conversation:
    """The messages so far, and a cache that has seen a beginning of them.

    Each turn renders the whole conversation, as the template wants it, and feeds the
    model the part that its cache has not seen.
    """

    def __init__(self, args: argparse.Namespace, progress: Progress):
        self._args = args
        self._model, self._tokenizer = load_model(args, progress)
        if not self._tokenizer.has_chat_template:
            raise ValueError(
                f"[chat] Expected a file with a chat template. Received {args.file!r}, which has "
                f"none; try: mlx-gguf generate."
            )
        self._options = stream_options(args, self._tokenizer, progress)
        self.reset()

    def reset(self) -> None:
        """Forget everything that was said."""
        self._messages = first_messages(self._args)
        self._forget()

    def ask(self, text: str) -> None:
        """Stream the answer to one more message."""
        from mlx_lm import stream_generate

        self._messages.append({"role": "user", "content": text})
        prompt = render_chat(
            self._tokenizer, self._messages, self._args, add_generation_prompt=True
        )
        unseen = self._rewind(prompt)
        answer = ""
        try:
            for response in stream_generate(
                self._model, self._tokenizer, unseen, prompt_cache=self._cache, **self._options
            ):
                print(response.text, end="", flush=True)
                answer += response.text
                self._seen.append(response.token)
        except KeyboardInterrupt:
            # The cache may have been caught between two layers.
            self._forget()
        print(flush=True)
        self._messages.append({"role": "assistant", "content": answer})

    def _forget(self) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._cache = make_prompt_cache(self._model, self._args.max_kv_size)
        self._seen: list[int] = []

    def _rewind(self, prompt: list[int]) -> list[int]:
        """Cut the cache to what it shares with the prompt; return the rest of the prompt."""
        from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

        shared = 0
        # The model needs at least one token to answer to.
        for old, new in zip(self._seen, prompt[:-1], strict=False):
            if old != new:
                break
            shared += 1
        surplus = len(self._seen) - shared
        if surplus and can_trim_prompt_cache(self._cache):
            trim_prompt_cache(self._cache, surplus)
        elif surplus:
            self._forget()
            shared = 0
        self._seen = list(prompt)
        return prompt[shared:]


def _read_line() -> str | None:
    """Read a line, or return None at the end of the input."""
    try:
        return input(">> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None


def _note(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
