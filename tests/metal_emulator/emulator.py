"""Runs Metal kernels on this processor, lane by lane."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .build import (
    CompileError,
    EmulatorError,
    build_kernels,
    compile_only,
    load_runtime,
    preprocess,
)
from .checks import check_calls, check_space_casts, check_tokens, check_vectors
from .rewrite import rewrite
from .source import Kernel, SourceError, Unit
from .trace import TraceReport, summarize, take_records

_LOCK = threading.RLock()


class _Launch(ctypes.Structure):
    # Must match MtlLaunch in runtime.cpp.
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("slots", ctypes.c_void_p),
        ("constants", ctypes.c_void_p),
        ("constant_count", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("reverse", ctypes.c_int32),
        ("flush_half", ctypes.c_int32),
    )


def _as_array(value: Any) -> np.ndarray:
    """Numpy arrays as they are; anything else as an array that must not be written."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        array = np.frombuffer(bytes(value), np.uint8)
    elif isinstance(value, bool):
        array = np.array(value, np.bool_)
    elif isinstance(value, int):
        array = np.array(value, np.int32 if -(2**31) <= value < 2**31 else np.uint32)
    elif isinstance(value, float):
        array = np.array(value, np.float32)
    else:
        array = np.array(value)
    array.flags.writeable = False
    return array


class Library:
    """Metal source, compiled for this processor.

    Parameters
    ----------
    source : str
        Metal source text.
    kernels : list of str, optional
        Names (``host_name`` of explicit instantiations, or of plain kernels) to compile.
        All by default.
    include_dirs : sequence of path, optional
        Where ``#include "..."`` looks.
    defines : mapping, optional
        Preprocessor macros.
    sanitize : bool
        Check every memory access and undefined behaviour (guard pages alone otherwise).
    flush_half : bool
        Half subnormals become zero in conversions and arithmetic (x86-64 only).
    optimize : str
        The compiler's optimisation level.
    compile : bool
        False compiles at the first run only: enough for the checks.

    Raises
    ------
    CompileError
        The source does not compile.
    """

    def __init__(
        self,
        source: str,
        kernels: list[str] | None = None,
        *,
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        defines: Mapping[str, str] | None = None,
        sanitize: bool = True,
        flush_half: bool = False,
        optimize: str = "-O1",
        compile: bool = True,
    ) -> None:
        self._wanted = kernels
        self._sanitize = sanitize
        self._flush = flush_half
        self._preprocessed = preprocess(source, include_dirs, defines)
        self._optimize = optimize
        self._text, found = self._rewritten(launchers=True)
        self.kernels: dict[str, Kernel] = {k.name: k for k in found}
        if compile:
            self._library  # noqa: B018

    def _rewritten(self, *, launchers: bool) -> tuple[str, list[Kernel]]:
        try:
            return rewrite(Unit(self._preprocessed), self._wanted, launchers)
        except SourceError as error:
            raise CompileError(str(error)) from None

    @cached_property
    def _path(self) -> Path:
        return build_kernels(self._text, self._sanitize, self._flush, self._optimize)

    @cached_property
    def _library(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self._path))

    def check_address_spaces(self) -> None:
        """Compile once more, types only, with device, constant and threadgroup as address spaces.

        Raises
        ------
        CompileError
            An address space is wrong or was lost.
        """
        text, _ = self._rewritten(launchers=False)
        found = check_space_casts(compile_only(text, address_spaces=True))
        if found:
            raise CompileError("\n".join(found))

    def check_forbidden(self) -> None:
        """Refuse what Metal does not have although this compiler takes it.

        Raises
        ------
        CompileError
            Lists every problem with its line.
        """
        found = check_tokens(Unit(self._preprocessed))
        text, _ = self._rewritten(launchers=False)
        llvm = compile_only(text, address_spaces=False)
        found += check_calls(llvm) + check_vectors(llvm)
        if found:
            raise CompileError("\n".join(found))

    def run(
        self,
        name: str,
        grid: Sequence[int],
        threads: Sequence[int],
        buffers: Mapping[int, Any],
        *,
        threadgroup: Mapping[int, int] | None = None,
        constants: Mapping[int, Any] | None = None,
        offsets: Mapping[int, int] | None = None,
        order: str = "forward",
        guard: str = "end",
    ) -> None:
        """Run a kernel over a grid and write its results into the arrays given.

        Parameters
        ----------
        name : str
            Kernel name.
        grid, threads : sequence of int
            Threadgroups in the grid, and threads in a threadgroup: up to 3 each.
        buffers : mapping
            Buffer index to a C-contiguous numpy array, bytes or a scalar (int is int32, float
            is float32; numpy scalars keep their type). Writeable arrays receive the contents
            of the buffer after the run; writing to anything else is an error.
        threadgroup : mapping, optional
            Bytes of each ``[[threadgroup(n)]]`` argument.
        constants : mapping, optional
            Function constants by index.
        offsets : mapping, optional
            Bytes between a 256-byte boundary and a buffer's first byte.
        order : {"forward", "reverse"}
            Order in which lanes and simdgroups run. Results that differ show a race.
        guard : {"end", "start"}
            Which end of every buffer meets an inaccessible page.

        Raises
        ------
        EmulatorError
            An access out of bounds, undefined behaviour, divergent collectives, or a wrong
            launch.
        """
        arrays = {i: _as_array(v) for i, v in buffers.items()}
        with _LOCK:
            self._check_launch(name, threads, arrays)
            load_runtime().mtl_reset()
            places = self._place_buffers(name, arrays, offsets or {}, guard)
            slots = self._slots(name, places, threadgroup or {})
            self._launch(name, grid, threads, slots, constants or {}, order)
            for index, array in arrays.items():
                if array.flags.writeable:
                    ctypes.memmove(array.ctypes.data, places[index], array.nbytes)
                elif ctypes.string_at(places[index], array.nbytes) != array.tobytes():
                    raise EmulatorError(f"[{name}] Expected buffer {index} to stay unchanged.")

    def trace(
        self,
        name: str,
        grid: Sequence[int],
        threads: Sequence[int],
        buffers: Mapping[int, Any],
        **options: Any,
    ) -> TraceReport:
        """Run a kernel as ``run`` does and count its memory accesses.

        Counted are the loads and stores that this compiler's optimiser leaves: a value loaded
        twice in a row from the same address counts once.
        """
        if not self._sanitize:
            raise EmulatorError(f"[{name}] Expected a library with sanitize=True to trace.")
        runtime = load_runtime()
        with _LOCK:
            runtime.mtl_trace(1)
            try:
                self.run(name, grid, threads, buffers, **options)
                records = take_records(runtime)
            finally:
                runtime.mtl_trace(0)
        sizes = {i: _as_array(v).nbytes for i, v in buffers.items()}
        return summarize(name, records, sizes)

    def _check_launch(
        self, name: str, threads: Sequence[int], arrays: Mapping[int, np.ndarray]
    ) -> None:
        if name not in self.kernels:
            raise EmulatorError(f"[{name}] Expected one of {sorted(self.kernels)}.")
        kernel = self.kernels[name]
        most = min(1024, kernel.max_threads)
        count = int(np.prod(threads))
        if not 0 < count <= most:
            raise EmulatorError(
                f"[{name}] Expected 1 to {most} threads in a threadgroup. Received {count}."
            )
        used = {p.index for p in kernel.parameters if p.kind == "buffer"}
        if set(arrays) != used:
            raise EmulatorError(
                f"[{name}] Expected buffers {sorted(used)}. Received {sorted(arrays)}."
            )
        for index, array in arrays.items():
            if not array.flags.c_contiguous:
                raise EmulatorError(f"[{name}] Expected buffer {index} to be C-contiguous.")

    def _place_buffers(
        self,
        name: str,
        arrays: Mapping[int, np.ndarray],
        offsets: Mapping[int, int],
        guard: str,
    ) -> dict[int, int]:
        places = {}
        for index, array in arrays.items():
            shift = offsets.get(index, 0)
            places[index] = load_runtime().mtl_buffer(
                index,
                array.ctypes.data,
                array.nbytes,
                256 if shift else 16,
                shift,
                guard == "start",
            )
            if not places[index]:
                raise EmulatorError(f"[{name}] No room for buffer {index}.")
        return places

    def _slots(
        self, name: str, places: Mapping[int, int], threadgroup: Mapping[int, int]
    ) -> ctypes.Array[ctypes.c_void_p]:
        parameters = self.kernels[name].parameters
        slots = (ctypes.c_void_p * max(len(parameters), 1))()
        for i, p in enumerate(parameters):
            if p.kind == "buffer":
                slots[i] = places[p.index]
            elif p.kind == "threadgroup":
                size = threadgroup.get(p.index, 0)
                slots[i] = load_runtime().mtl_threadgroup_argument(p.index, size)
                if not slots[i]:
                    raise EmulatorError(
                        f"[{name}] Expected at most 32768 bytes of threadgroup memory. "
                        f"Received {size} for argument {p.index}."
                    )
        return slots

    def _launch(
        self,
        name: str,
        grid: Sequence[int],
        threads: Sequence[int],
        slots: ctypes.Array[ctypes.c_void_p],
        constants: Mapping[int, Any],
        order: str,
    ) -> None:
        kernel = self.kernels[name]
        values = {i: _as_array(v) for i, v in constants.items()}
        count = max(values, default=-1) + 1
        table = (ctypes.c_void_p * (count + 1))()
        for i, v in values.items():
            table[i] = v.ctypes.data
        launch = _Launch(
            entry=ctypes.cast(getattr(self._library, kernel.launcher), ctypes.c_void_p),
            name=name.encode(),
            slots=ctypes.cast(slots, ctypes.c_void_p),
            constants=ctypes.cast(table, ctypes.c_void_p),
            constant_count=count,
            grid=(ctypes.c_uint32 * 3)(*[*grid, 1, 1][:3]),
            threads=(ctypes.c_uint32 * 3)(*[*threads, 1, 1][:3]),
            reverse=order == "reverse",
            flush_half=self._flush,
        )
        runtime = load_runtime()
        if runtime.mtl_run(ctypes.byref(launch)):
            text = runtime.mtl_error().decode()
            raise EmulatorError(text + _source_line(self._path, runtime.mtl_error_pc()))


def _source_line(library: Path, pc: int) -> str:
    """Source line of an instruction, on machines that have addr2line."""
    tool = shutil.which("addr2line")
    if not pc or not tool:
        return ""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        start, end = (int(x, 16) for x in fields[0].split("-"))
        if start <= pc < end and fields[-1] == str(library):
            # One byte back: the address is the one that the call returns to.
            address = _virtual_address(library, pc - 1 - start + int(fields[2], 16))
            command = [tool, "-e", str(library), hex(address)]
            done = subprocess.run(command, capture_output=True, text=True)
            return f" ({done.stdout.strip().removeprefix('./')})"
    return ""


def _virtual_address(library: Path, file_offset: int) -> int:
    """Address of a byte of an ELF file, from its program headers."""
    data = library.read_bytes()
    start = int.from_bytes(data[32:40], "little")
    size, count = (int.from_bytes(data[o : o + 2], "little") for o in (54, 56))
    for i in range(count):
        header = data[start + i * size :][:56]
        kind = int.from_bytes(header[:4], "little")
        offset, address = (int.from_bytes(header[o : o + 8], "little") for o in (8, 16))
        length = int.from_bytes(header[32:40], "little")
        if kind == 1 and offset <= file_offset < offset + length:
            return file_offset - offset + address
    return file_offset
