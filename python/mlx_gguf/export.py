"""Exporting functions that use our operations.

MLX writes a function to a file as a graph of primitives it knows by name, and has
no place where an extension could add its own. So while MLX traces a function for
export, our operations build MLX's primitives instead: the file holds the packed
bytes and the arithmetic of the format, gives the same values, and runs in any
MLX program, without this package, in Python or C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from . import _ext

_export_function = mx.export_function
_exporter = mx.exporter


@contextmanager
def native_ops() -> Iterator[None]:
    """Within it, on this thread, our operations build MLX's own primitives.

    Results are equal but for the order of summation, and slower: weights are
    dequantised as a whole. For tools that must know every primitive of a graph.
    """
    before = _ext.native_ops()
    _ext.set_native_ops(True)
    try:
        yield
    finally:
        _ext.set_native_ops(before)


def export_function(file: str | Callable, fun: Callable, *args: Any, **kwargs: Any) -> None:
    """Export a function that may use our operations; as ``mx.export_function``.

    Importing this package makes ``mx.export_function`` this function.
    """
    with native_ops():
        _export_function(file, fun, *args, **kwargs)


class _Exporter:
    """What ``mx.exporter`` returns, tracing with :func:`native_ops`."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with native_ops():
            self._inner(*args, **kwargs)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> _Exporter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def exporter(file: str, fun: Callable, **kwargs: Any) -> _Exporter:
    """Export several traces of a function to one file; as ``mx.exporter``.

    Importing this package makes ``mx.exporter`` this function.
    """
    return _Exporter(_exporter(file, fun, **kwargs))


# MLX refuses to save a primitive it does not know, so its own entry points must
# trace with ours out of the way.
mx.export_function = export_function  # type: ignore[assignment]
mx.exporter = exporter  # type: ignore[assignment]
