"""NVRTC and the CUDA driver by ctypes: kernels launched by themselves, timed as graph replays."""

from __future__ import annotations

import ctypes as C
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
PARAMS = {  # cuda/params.h
    "u32": ["M", "N", "K", "gather", "has_c"],
    "f32": ["alpha", "beta"],
    "more": ["tiles", "held", "columns", "rows", "split", "ranks", "stages"],
    "last": ["inverse", "last_x", "last_w", "early"],
    "u64": ["x_step", "w_step", "c_step", "y_step"],
}


class Params(C.Structure):
    _fields_ = [
        *((name, C.c_uint32) for name in PARAMS["u32"]),
        *((name, C.c_float) for name in PARAMS["f32"]),
        *((name, C.c_uint32) for name in PARAMS["more"] + PARAMS["last"]),
        *((name, C.c_uint64) for name in PARAMS["u64"]),
    ]


class TensorMap(C.Structure):
    _fields_ = [("opaque", C.c_uint64 * 16)]


def flatten(path: Path, seen: set[Path] | None = None) -> str:
    """The text of a source with what it includes, as the build embeds it."""
    seen = set() if seen is None else seen
    path = path.resolve()
    if path in seen:
        return ""
    seen.add(path)
    out = []
    for line in path.read_text().splitlines(keepends=True):
        include = re.match(r'#include "(.*)"', line)
        if include:
            out.append(flatten(path.parent / include[1], seen))
        elif not line.startswith("#pragma once"):
            out.append(line)
    return "".join(out)


def library() -> C.CDLL:
    """NVRTC: on the search path, or in the package that MLX's CUDA wheels depend on."""
    import importlib.util

    names = ["libnvrtc.so.13"]
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        names += map(str, Path(place).glob("cu13/lib/libnvrtc.so.13"))
    for name in names:
        try:
            return C.CDLL(name)
        except OSError:
            continue
    raise OSError("[library] Expected NVRTC 13. Received none; run: pip install nvidia-cuda-nvrtc")


def compile(source: str, functions: list[str], arch: str = "sm_90") -> tuple[bytes, list[bytes]]:
    """Compile functions of a source; returns the cubin and their lowered names."""
    nvrtc = library()
    program = C.c_void_p()
    nvrtc.nvrtcCreateProgram(C.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    for function in functions:
        nvrtc.nvrtcAddNameExpression(program, function.encode())
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    result = nvrtc.nvrtcCompileProgram(program, 2, (C.c_char_p * 2)(*options))
    size = C.c_size_t()
    if result:
        nvrtc.nvrtcGetProgramLogSize(program, C.byref(size))
        log = C.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(
            f"[compile] Expected {functions} to compile. Received:\n{log.value.decode()}"
        )
    names = []
    for function in functions:
        name = C.c_char_p()
        nvrtc.nvrtcGetLoweredName(program, function.encode(), C.byref(name))
        names.append(name.value or b"")
    nvrtc.nvrtcGetCUBINSize(program, C.byref(size))
    code = C.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(C.byref(program))
    return code.raw, names


class Device:
    """The first CUDA device, with a stream of its own in the primary context."""

    def __init__(self):
        self.cuda = C.CDLL("libcuda.so.1")
        device, context, self.stream = C.c_int(), C.c_void_p(), C.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", C.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", C.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", C.byref(self.stream), 1)
        self._modules = []

    def call(self, name: str, *arguments) -> None:
        if result := getattr(self.cuda, name)(*arguments):
            text = C.c_char_p()
            self.cuda.cuGetErrorString(result, C.byref(text))
            raise RuntimeError(f"[{name}] Expected success. Received {result}: {text.value}")

    def function(self, code: bytes, name: bytes) -> C.c_void_p:
        module, out = C.c_void_p(), C.c_void_p()
        data = C.create_string_buffer(code, len(code))
        self.call("cuModuleLoadData", C.byref(module), data)
        self.call("cuModuleGetFunction", C.byref(out), module, name)
        self.call("cuFuncSetAttribute", out, 8, 227 * 1024 if b"read" not in name else 0)
        self._modules.append((module, data))
        return out

    def malloc(self, nbytes: int) -> int:
        out = C.c_uint64()
        self.call("cuMemAlloc_v2", C.byref(out), C.c_size_t(nbytes))
        return out.value

    def upload(self, to: int, a: np.ndarray) -> None:
        a = np.ascontiguousarray(a)
        pointer = a.ctypes.data_as(C.c_void_p)
        self.call("cuMemcpyHtoD_v2", C.c_uint64(to), pointer, C.c_size_t(a.nbytes))

    def download(self, at: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        out = np.empty(shape, dtype)
        pointer = out.ctypes.data_as(C.c_void_p)
        self.call("cuMemcpyDtoH_v2", pointer, C.c_uint64(at), C.c_size_t(out.nbytes))
        return out

    def repeat(self, at: int, nbytes: int, total: int) -> None:
        """Fill `total` bytes with copies of the first `nbytes`."""
        while nbytes < total:
            more = min(nbytes, total - nbytes)
            self.call("cuMemcpyDtoD_v2", C.c_uint64(at + nbytes), C.c_uint64(at), C.c_size_t(more))
            nbytes += more

    def tensor_map(self, at: int, row_bytes: int, N: int, interleave: int, box: int) -> TensorMap:
        """What csrc/cuda/launch.cpp encodes."""
        memory = (C.c_char * 256)()
        aligned = (C.addressof(memory) + 63) & ~63
        sizes = (C.c_uint64 * 3)(row_bytes * interleave // 8, N // interleave, 1)
        strides = (C.c_uint64 * 2)(row_bytes * interleave, row_bytes * N)
        rows = 16 if interleave == 1 else 8 // interleave
        boxes, steps = (C.c_uint32 * 3)(box // 8, rows, 1), (C.c_uint32 * 3)(1, 1, 1)
        self.call(
            "cuTensorMapEncodeTiled",
            C.c_void_p(aligned),
            4,  # 64-bit unsigned
            3,
            C.c_void_p(at),
            sizes,
            strides,
            boxes,
            steps,
            0,
            0,
            2,  # fetch 128 bytes
            0,
        )
        out = TensorMap()
        C.memmove(C.byref(out), aligned, 128)
        return out

    def launch(
        self, function, grid, block, shared_bytes: int, cluster: int, arguments, early: bool = False
    ) -> None:
        """early: beside the kernel before it, for which it waits by itself."""
        values = [C.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        pointers = (C.c_void_p * len(values))(*(C.addressof(v) for v in values))

        class Attribute(C.Structure):
            _fields_ = [("id", C.c_uint), ("pad", C.c_uint), ("value", C.c_uint * 16)]

        class Config(C.Structure):
            _fields_ = [
                ("grid", C.c_uint * 3),
                ("block", C.c_uint * 3),
                ("shared", C.c_uint),
                ("stream", C.c_void_p),
                ("attributes", C.c_void_p),
                ("count", C.c_uint),
            ]

        attributes = (Attribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count].id = 4  # cluster dimension
            attributes[count].value[:3] = cluster, 1, 1
            count += 1
        if early:
            attributes[count].id = 6  # programmatic stream serialization
            attributes[count].value[0] = 1
            count += 1
        config = Config(
            (C.c_uint * 3)(*grid), (C.c_uint * 3)(*block), shared_bytes, self.stream.value
        )
        config.attributes, config.count = C.addressof(attributes), count
        self.call("cuLaunchKernelEx", C.byref(config), function, pointers, None)

    def seconds(self, launch: Callable[[int], None], count: int, replays: int = 15) -> float:
        """Median time of launch(0), ..., launch(count - 1) captured in one graph, for each."""
        launch(0)
        self.call("cuStreamSynchronize", self.stream)
        graph, run, events = C.c_void_p(), C.c_void_p(), [C.c_void_p(), C.c_void_p()]
        self.call("cuStreamBeginCapture_v2", self.stream, 2)
        for i in range(count):
            launch(i)
        self.call("cuStreamEndCapture", self.stream, C.byref(graph))
        self.call("cuGraphInstantiateWithFlags", C.byref(run), graph, C.c_uint64(0))
        for event in events:
            self.call("cuEventCreate", C.byref(event), 0)
        times = []
        for i in range(replays + 2):
            self.call("cuEventRecord", events[0], self.stream)
            self.call("cuGraphLaunch", run, self.stream)
            self.call("cuEventRecord", events[1], self.stream)
            self.call("cuEventSynchronize", events[1])
            ms = C.c_float()
            self.call("cuEventElapsedTime_v2", C.byref(ms), *events)
            if i >= 2:
                times.append(ms.value * 1e-3 / count)
        self.call("cuGraphExecDestroy", run)
        self.call("cuGraphDestroy", graph)
        return float(np.median(times))
