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
    turns : int
        How often one evaluation of a benchmark may take the same weights: where a product takes
        microseconds, it must hold many, so that what it costs to start is little of it.
    """

    stream: mx.Device
    dtype: str
    turns = 1

    @abstractmethod
    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        """Seconds in which the device reads the bytes of all arrays and does nothing else: one
        launch each, or in proportion to what a larger buffer takes."""

    def read_rate(self, nbytes: int, passes: int) -> float:
        """Bytes a second of a buffer that is read over and over; the median of the passes."""
        reads = [self.buffer(nbytes)]
        self.read_seconds(reads)  # wakes the threads; page tables and clocks settle
        return nbytes / statistics.median(self.read_seconds(reads) for _ in range(passes))

    def buffer(self, nbytes: int) -> mx.array:
        """So many bytes in memory."""
        out = mx.ones((nbytes,), mx.uint8, stream=self.stream)
        mx.eval(out)
        return out

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


class _GPU(Device):
    stream = mx.Device(mx.gpu)
    dtype = "float16"

    @abstractmethod
    def read(self, w: mx.array) -> mx.array:
        """Read an array 16 bytes a lane and do nothing else."""

    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        reads = [self.read(a) for a in arrays]
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


class _Metal(_GPU):
    def read(self, w: mx.array) -> mx.array:
        return _read(mx.fast.metal_kernel, w, _READ_ON_METAL, lanes=1 << 16)


class _CUDA(_GPU):
    turns = 64
    _buffer_bytes, _reads = 1 << 30, 16

    def read(self, w: mx.array) -> mx.array:
        return _read(mx.fast.cuda_kernel, w, _READ_ON_CUDA, lanes=1 << 18)

    def read_rate(self, nbytes: int, passes: int) -> float:
        # An evaluation takes longer to start than the device to read once.
        reads = [self.buffer(nbytes)] * self._reads
        super().read_seconds(reads)
        taken = statistics.median(super(_CUDA, self).read_seconds(reads) for _ in range(passes))
        return nbytes * self._reads / taken

    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        # At the speed of a gigabyte: the host takes longer to start a read of a few megabytes
        # than the device to do it.
        return sum(a.nbytes for a in arrays) / self.read_rate(self._buffer_bytes, 1)


_DEVICES: dict[str, type[_CPU | _GPU]] = {"cpu": _CPU, "metal": _Metal, "cuda": _CUDA}


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


def read_floor(nbytes: int = _BUFFER_BYTES, *, passes: int = 7) -> float:
    """Measure how fast MLX's default device reads memory and does nothing else.

    Parameters
    ----------
    nbytes : int, optional
        Size of the buffer, which should be much larger than the last-level cache.
        Default: 512 MiB.
    passes : int, optional
        Measurements. Default: 7.

    Returns
    -------
    float
        The median over the passes, in GB/s (1e9 bytes a second). On the CPU, of all its threads.
    """
    return find_device(default_backend()).read_rate(nbytes, passes) / 1e9


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


_READ_ON_METAL = """
    auto lines = reinterpret_cast<const device uint4*>(w);
    uint4 sum = 0;
    for (uint i = thread_position_in_grid.x; i < n; i += threads_per_grid.x) {
      sum ^= lines[i];
    }
    out[thread_position_in_grid.x] = sum.x ^ sum.y ^ sum.z ^ sum.w;
"""
# Eight loads of a lane are on their way at a time.
_READ_ON_CUDA = """
    auto lines = reinterpret_cast<const uint4*>(w);
    uint32_t lane = blockIdx.x * blockDim.x + threadIdx.x, lanes = gridDim.x * blockDim.x;
    uint32_t sum = 0, i = lane, end = *n;
    for (; uint64_t(i) + 7 * lanes < end; i += 8 * lanes) {
      uint4 v[8];
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = __ldcs(lines + i + j * lanes);
      }
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
      }
    }
    for (; i < end; i += lanes) {
      uint4 v = __ldcs(lines + i);
      sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    out[lane] = sum;
"""


def _read(make: Any, w: mx.array, source: str, lanes: int) -> mx.array:
    kernel = make(
        name="gguf_read_floor", input_names=["w", "n"], output_names=["out"], source=source
    )
    (out,) = kernel(
        inputs=[w, mx.array(w.nbytes // 16, mx.uint32)],
        output_shapes=[(lanes,)],
        output_dtypes=[mx.uint32],
        grid=(lanes, 1, 1),
        threadgroup=(256, 1, 1),
        stream=mx.gpu,
    )
    return out
