"""ggml as a rival in :mod:`mlx_gguf.bench`: the shared libraries that llama-cpp-python brings.

It gets the same bytes as weights and, as in llama.cpp, float32 activations. Where one of its
buffer types takes the weights in another order (repacked, or for AMX), they are, as
llama.cpp does on loading.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import _ext
from .bench import Contender, Launch, checked_rows
from .reference import RandomWeights, activations, float64
from .tune import Matrix

__all__ = ["Weights", "installed"]

_F32 = 0  # ggml's number of the type
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
# ggml tells of every matrix that it repacks. It keeps the pointer, and so does this.
_SILENCE = _LogCallback(lambda level, text, data: None)

# Result and arguments of the functions in use; structures are only passed by pointer, so that
# this holds for every version that has the functions.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_init": (c_void_p, _InitParams),
    "ggml_log_set": (None, _LogCallback, c_void_p),
    "ggml_free": (None, c_void_p),
    "ggml_type_name": (c_char_p, c_int),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_buffer_clear": (None, c_void_p, ctypes.c_uint8),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_get_device": (c_void_p, c_void_p),
    "ggml_backend_dev_backend_reg": (c_void_p, c_void_p),
    "ggml_backend_dev_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_free": (None, c_void_p),
}


def _library_folder() -> Path | None:
    spec = find_spec("llama_cpp")
    places = spec.submodule_search_locations if spec else None
    folder = Path(places[0]) / "lib" if places else None
    return folder if folder and (folder / f"libggml-base{_SUFFIX}").exists() else None


def installed() -> bool:
    """Whether llama-cpp-python is here, with ggml's libraries."""
    return _library_folder() is not None


class _Library:
    """ggml's functions, as attributes, from whichever of its libraries has them."""

    def __init__(self, folder: Path):
        names = ("libggml-base", "libggml-cpu")
        libraries = [ctypes.CDLL(str(folder / f"{name}{_SUFFIX}")) for name in names]
        for name, (result, *arguments) in _FUNCTIONS.items():
            owner = next((lib for lib in libraries if hasattr(lib, name)), None)
            if owner is None:
                raise ImportError(
                    f"[bench] Expected a llama-cpp-python whose ggml has {name}. Received the "
                    f"libraries in '{folder}'."
                )
            function = getattr(owner, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.log_set(_SILENCE, None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # all are set above

    def context(self, tensors: int, nodes: int = 0) -> int:
        """A place for the descriptions of tensors and, if it has nodes, a graph."""
        size = tensors * self.tensor_overhead()
        if nodes:
            size += self.graph_overhead_custom(nodes, False)
        return self.init(_InitParams(size, None, True))


@cache
def _library() -> _Library:
    folder = _library_folder()
    assert folder is not None
    return _Library(folder)


class Weights:
    """A matrix in ggml's memory, as often as in ours; a context manager that frees it."""

    def __init__(self, matrix: Matrix, weights: RandomWeights, copies: Sequence[mx.array]):
        self._ggml = ggml = _library()
        number = _number(matrix.qtype)
        if ggml.type_name(number).decode().lower() != matrix.qtype:
            raise ValueError(
                f"[bench] Expected a ggml with type {matrix.qtype}, number {number}. "
                f"Received one that calls it {ggml.type_name(number).decode()!r}."
            )
        self._matrix, self._weights, self._copies = matrix, weights, copies
        self._backend = _make_backend(ggml)
        self._context = ggml.context(len(copies))
        self._tensors = [
            ggml.new_tensor_2d(self._context, number, matrix.K, matrix.N) for _ in copies
        ]
        self._buffer, self._order = self._allocate()
        packed = np.ascontiguousarray(weights.packed)
        for tensor in self._tensors:
            ggml.backend_tensor_set(tensor, packed.ctypes.data, 0, packed.nbytes)

    def _allocate(self) -> tuple[int, str]:
        """Memory of the first buffer type that takes the weights, and what it calls itself."""
        ggml = self._ggml
        for number, buffer_type in enumerate(_buffer_types(ggml, self._backend)):
            name = ggml.backend_buft_name(buffer_type).decode().lower().removeprefix("cpu_")
            if self._takes(buffer_type) and _survives(number, self._matrix.qtype):
                return ggml.backend_alloc_ctx_tensors_from_buft(self._context, buffer_type), name
        return ggml.backend_alloc_ctx_tensors(self._context, self._backend), ""

    def _takes(self, buffer_type: int) -> bool:
        ggml, matrix = self._ggml, self._matrix
        context = ggml.context(1)
        w = ggml.new_tensor_2d(context, _number(matrix.qtype), matrix.K, matrix.N)
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        with_x = ggml.context(2)
        x = ggml.new_tensor_2d(with_x, _F32, matrix.K, 1)
        device = ggml.backend_get_device(self._backend)
        takes = bool(buffer) and ggml.backend_dev_supports_op(device, ggml.mul_mat(with_x, w, x))
        if buffer:
            ggml.backend_buffer_free(buffer)
        ggml.free(context)
        ggml.free(with_x)
        return takes

    def contender(self, M: int, rng: np.random.Generator) -> Contender:
        """Products with M rows of x."""
        x, x64 = activations((M, self._matrix.K), "float32", rng, normal=True)
        x32 = np.array(x)
        at = checked_rows(M)
        ref, _ = self._weights.product(x64[at])

        def prepare(numbers: Sequence[int]) -> Launch:
            return _Launch(
                self._ggml, self._backend, [self._tensors[i] for i in numbers], x32, self._matrix.N
            )

        def error(y: mx.array) -> float:
            got = float64(y[mx.array(at)])
            return float(np.linalg.norm(got - ref) / np.linalg.norm(ref))

        qtype, nbytes = self._matrix.qtype, self._matrix.nbytes
        kernel = f"ggml ({self._order})" if self._order else "ggml"
        copies = [(w,) for w in self._copies]
        return Contender(kernel, qtype, "float32", nbytes, copies, prepare, error)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self._ggml.backend_buffer_free(self._buffer)
        self._ggml.free(self._context)
        self._ggml.backend_free(self._backend)


class _Launch:
    """A graph of products, and the memory of its results."""

    def __init__(self, ggml: _Library, backend: int, tensors: list[int], x: np.ndarray, N: int):
        self._ggml, self._backend, self._shape = ggml, backend, (len(x), N)
        self._context = ggml.context(len(tensors) + 1, len(tensors) + 1)
        rows = ggml.new_tensor_2d(self._context, _F32, x.shape[1], len(x))
        self._outputs = [ggml.mul_mat(self._context, w, rows) for w in tensors]
        self._buffer = ggml.backend_alloc_ctx_tensors(self._context, backend)
        # Touches the pages, which is no part of a product.
        ggml.backend_buffer_clear(self._buffer, 0)
        ggml.backend_tensor_set(rows, x.ctypes.data, 0, x.nbytes)
        self._graph = ggml.new_graph_custom(self._context, len(tensors) + 1, False)
        for y in self._outputs:
            ggml.build_forward_expand(self._graph, y)

    def run(self) -> None:
        if status := self._ggml.backend_graph_compute(self._backend, self._graph):
            raise RuntimeError(f"[bench] Expected ggml to compute. Received status {status}.")

    def results(self) -> list[mx.array]:
        out = []
        for y in self._outputs:
            values = np.empty(self._shape, np.float32)
            self._ggml.backend_tensor_get(y, values.ctypes.data, 0, values.nbytes)
            out.append(mx.array(values))
        return out

    def __del__(self) -> None:
        self._ggml.backend_buffer_free(self._buffer)
        self._ggml.free(self._context)


def _number(qtype: str) -> int:
    format = _ext.find_format(qtype)
    assert format is not None
    return format.id


def _make_backend(ggml: _Library) -> int:
    backend = ggml.backend_cpu_init()
    ggml.backend_cpu_set_n_threads(backend, _ext.cpu_threads())
    return backend


def _buffer_types(ggml: _Library, backend: int) -> list[int]:
    """Those that keep weights in an order of their own, the preferred first."""
    device = ggml.backend_get_device(backend)
    registry = ggml.backend_dev_backend_reg(device)
    name = b"ggml_backend_dev_get_extra_bufts"
    address = ggml.backend_reg_get_proc_address(registry, name)
    if not address:
        return []
    return _until_null(ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(device))


@cache
def _survives(buffer_type: int, qtype: str) -> bool:
    """Whether a small product in a buffer type ends well, in a process of its own.

    There are builds of ggml whose AMX kernels die of an illegal instruction where the
    processor has AMX; that is not to be the end of a measurement.
    """
    command = [sys.executable, "-m", __spec__.name, str(buffer_type), qtype]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def _try(buffer_type: int, qtype: str) -> None:
    ggml = _library()
    backend = _make_backend(ggml)
    N, K, M = 256, 1024, 64
    packed = RandomWeights(qtype, (N, K), np.random.default_rng(0)).packed
    context = ggml.context(1)
    w = ggml.new_tensor_2d(context, _number(qtype), K, N)
    ggml.backend_alloc_ctx_tensors_from_buft(context, _buffer_types(ggml, backend)[buffer_type])
    ggml.backend_tensor_set(w, packed.ctypes.data, 0, packed.nbytes)
    for rows in (1, M):
        _Launch(ggml, backend, [w], np.ones((rows, K), np.float32), N).run()


def _until_null(pointers: Any) -> list[int]:
    found: list[int] = []
    while pointers and pointers[len(found)]:
        found.append(pointers[len(found)])
    return found


if __name__ == "__main__":
    _try(int(sys.argv[1]), sys.argv[2])
