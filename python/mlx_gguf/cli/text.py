"""Numbers, names and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Escape what a terminal would act on: a file's strings may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int) -> str:
    """Bytes in the decimal unit that fits: ``"253.1 MB"``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


def shape(dims: Sequence[int]) -> str:
    """A shape, outermost dimension first: ``"640 x 2048"``."""
    return " x ".join(map(str, dims))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns as wide as their widest cell; ``align`` has ``<`` or ``>`` for each."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in (header, *rows)
    )
