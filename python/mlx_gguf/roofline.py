"""The bound on decoding: the bytes a token needs and how fast this machine reads bytes."""

from __future__ import annotations

import statistics

import mlx.core as mx

from . import _ext
from .file import GGUFFile

__all__ = ["bytes_per_token", "read_floor"]

# Several times the last-level cache of common machines, so that memory is measured.
_BUFFER_BYTES = 512 << 20


def read_floor(nbytes: int = _BUFFER_BYTES, *, passes: int = 7) -> float:
    """Measure how fast all CPU threads read memory and do nothing else.

    Parameters
    ----------
    nbytes : int, optional
        Size of the buffer, which should be much larger than the last-level cache.
        Default: 512 MiB.
    passes : int, optional
        Reads of the whole buffer. Default: 7.

    Returns
    -------
    float
        The median over the passes, in GB/s (1e9 bytes a second).
    """
    buffer = mx.ones((nbytes,), mx.uint8, stream=mx.cpu)
    mx.eval(buffer)
    _ext.read_seconds(buffer)  # wakes the threads; page tables and clocks settle
    return nbytes / statistics.median(_ext.read_seconds(buffer) for _ in range(passes)) / 1e9


def bytes_per_token(file: GGUFFile) -> int:
    """Count the bytes of weight matrices that decoding one token reads.

    Every matrix is read once, and of a layer's experts the ones in use. An embedding table
    counts where it is the head too; looking up one row of it costs nothing to speak of.
    """
    prefix = f"{file.metadata.get('general.architecture')}."
    used = file.metadata.get(prefix + "expert_used_count", 1)
    total = 0
    for info in file.tensors.values():
        if len(info.shape) < 2 or (info.name == "token_embd.weight" and "output.weight" in file):
            continue
        total += info.nbytes * used // info.shape[0] if len(info.shape) == 3 else info.nbytes
    return total
