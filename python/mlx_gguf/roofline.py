"""The bounds on a product's speed: how fast this machine reads bytes and does arithmetic."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from . import _ext
from .file import GGUFFile

__all__ = ["Device", "bytes_per_token", "default_backend", "find_device", "read_floor"]

# Several times the last-level cache of common machines, so that memory is measured.
_BUFFER_BYTES = 512 << 20


class Device(ABC):
    """What the device of a backend is measured with, beside its products.

    Attributes
    ----------
    stream : Device
        Where operations run; MLX's.
    dtype : str
        Of activations in a model that is loaded without naming one.
    """

    stream: mx.Device
    dtype: str

    @abstractmethod
    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        """Seconds in which the device reads every array, one launch each, and does nothing
        else."""

    @abstractmethod
    def peaks(self) -> dict[str, float]:
        """GFLOP/s of arithmetic that waits for no memory, by kind, the main one first.

        One short measurement. A multiply-add counts as two operations.
        """


class _CPU(Device):
    stream = mx.Device(mx.cpu)
    dtype = "float32"

    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        return sum(map(_ext.read_seconds, arrays))

    def peaks(self) -> dict[str, float]:
        peaks = {"float32 multiply-adds": _ext.peak_f32() / 1e9}
        if int8 := _ext.peak_int8():
            peaks["int8 dot products"] = int8 / 1e9
        return peaks


class _Metal(Device):
    stream = mx.Device(mx.gpu)
    dtype = "float16"

    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        reads = [_read_on_metal(a) for a in arrays]
        start = time.perf_counter()
        mx.eval(reads)
        return time.perf_counter() - start

    def peaks(self) -> dict[str, float]:
        # MLX's own product of large matrices, of which a GPU makes the most.
        n = 4096
        a, b = (mx.ones((n, n), mx.float16, stream=self.stream) for _ in range(2))
        mx.eval(a, b)
        start = time.perf_counter()
        mx.eval(mx.matmul(a, b, stream=self.stream))
        return {"float16 matrix product": 2e-9 * n**3 / (time.perf_counter() - start)}


_DEVICES = {"cpu": _CPU, "metal": _Metal}


def find_device(backend: str) -> Device:
    """The device of a backend.

    Raises
    ------
    ValueError
        A backend that is not on this machine.
    """
    here = [name for name in _ext.backends() if name in _DEVICES]
    if backend not in here:
        raise ValueError(
            f"[roofline] Expected a backend of this machine, {' or '.join(here)}. "
            f"Received {backend!r}."
        )
    return _DEVICES[backend]()


def default_backend() -> str:
    """The backend of MLX's default device, or ``"cpu"`` if there is none for it."""
    gpus = [name for name in _ext.backends() if name != "cpu" and name in _DEVICES]
    return gpus[0] if gpus and mx.default_device().type == mx.gpu else "cpu"


def on_cuda() -> bool:
    """Whether MLX's default device is a GPU that the CUDA backend serves."""
    return mx.default_device().type == mx.gpu and "cuda" in _ext.backends()


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


_READ_SOURCE = """
    auto lines = reinterpret_cast<const device uint4*>(w);
    uint4 sum = 0;
    for (uint i = thread_position_in_grid.x; i < n; i += threads_per_grid.x) {
      sum ^= lines[i];
    }
    out[thread_position_in_grid.x] = sum.x ^ sum.y ^ sum.z ^ sum.w;
"""
_READ_LANES = 1 << 16


def _read_on_metal(w: mx.array) -> mx.array:
    """Read an array 16 bytes a lane and do nothing else."""
    kernel: Any = mx.fast.metal_kernel(
        name="gguf_read_floor", input_names=["w", "n"], output_names=["out"], source=_READ_SOURCE
    )
    (out,) = kernel(
        inputs=[w, mx.array(w.nbytes // 16, mx.uint32)],
        output_shapes=[(_READ_LANES,)],
        output_dtypes=[mx.uint32],
        grid=(_READ_LANES, 1, 1),
        threadgroup=(256, 1, 1),
        stream=mx.gpu,
    )
    return out
