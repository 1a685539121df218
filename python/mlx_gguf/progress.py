"""What is going on, on a terminal; nothing where standard error is a pipe or a file."""

from __future__ import annotations

import sys
from types import TracebackType

_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """One line on standard error that is rewritten, and gone at the end.

    >>> with Progress("loading model.gguf") as progress:
    ...     progress.show("reading the prompt: 512 of 2048 tokens")
    """

    def __init__(self, text: str):
        self._on = sys.stderr.isatty()
        self.show(text)

    def show(self, text: str) -> None:
        """Put another text in the line's place."""
        self._write(f"{_CLEAR_LINE}{text} ...")

    def clear(self) -> None:
        """Take the line away; :meth:`show` brings it back."""
        self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        if self._on:
            sys.stderr.write(text)
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
