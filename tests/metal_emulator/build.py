"""Compiler calls and the cache of what they made."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Metal's base language. What it takes of later ones with a warning, clang does as well.
_LANGUAGE = [
    "-std=c++14",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-fno-stack-protector",
    "-g1",
    "-flax-vector-conversions=none",
    "-fdebug-compilation-dir=.",
    "-ffp-contract=off",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
]
_WARNINGS = [
    "-Werror=return-type",
    "-Werror=vla",
    *(
        f"-Wno-{w}"
        for w in [
            "c++17-extensions",
            "c++20-extensions",
            "unknown-attributes",
            "ignored-attributes",
            "duplicate-decl-specifier",
            "unused-value",
            "unknown-pragmas",
            "pass-failed",
            "static-in-inline",
        ]
    ),
]
_SANITIZERS = [
    "-fsanitize=undefined",
    "-fno-sanitize=vptr,function",
    "-fno-sanitize-recover=all",
    *["-Xclang", "-fsanitize=address"],
    *(
        word
        for option in (
            "-asan-instrumentation-with-call-threshold=0",
            "-asan-use-after-return=never",
            "-asan-globals=0",
            "-asan-opt-same-temp=0",
            "-asan-mapping-offset=0x7fff8000",  # Must match mtl_shadow_offset in memory.h.
        )
        for word in ("-mllvm", option)
    ),
]
_RUNTIME = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fno-threadsafe-statics",
    "-fno-sanitize=all",
    "-Wall",
]


class EmulatorError(RuntimeError):
    """A kernel did what Metal forbids, or a launch was wrong."""


class CompileError(EmulatorError):
    """The source is refused; the message is the compiler's or a check's."""


def _compiler(arguments: Sequence[str]) -> str:
    import ziglang

    zig = Path(ziglang.__file__).parent / "zig"
    done = subprocess.run(
        [str(zig), "c++", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise CompileError(done.stderr or f"the compiler ended with {done.returncode}")
    return done.stdout


@cache
def _processor(flush: bool) -> tuple[str, ...]:
    """Target features; conversions of half are calls, and can flush, without F16C."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    flags = Path("/proc/cpuinfo").read_text().split("flags", 2)[1].split("\n")[0].split()
    if not {"avx2", "f16c", "fma", "bmi2"} <= set(flags):
        return ("-mcpu=x86_64",)
    return ("-mcpu=x86_64_v3" + ("-f16c" if flush else ""),)


def _cache_folder() -> Path:
    default = Path(tempfile.gettempdir()) / f"mlx-gguf-metal-emulator-{os.getuid()}"
    path = Path(os.environ.get("MLX_GGUF_EMULATOR_CACHE", default))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise EmulatorError(f"Expected {path}, whose libraries are loaded, to be this user's own.")
    return path


@contextlib.contextmanager
def _building(target: Path) -> Iterator[Path | None]:
    """Yield a path to build at, or None when ``target`` exists; safe among processes."""
    if target.exists():
        yield None
        return
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            yield partial
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


@cache
def _own_text() -> str:
    files = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), *HERE.glob("include/*.h")]
    return "\0".join(p.read_text() for p in sorted(files))


def _build_runtime() -> Path:
    flags = [*_RUNTIME, *_processor(False)]
    target = _cache_folder() / f"libmtlrt-{_digest(_own_text(), *flags)}.so"
    with _building(target) as partial:
        if partial:
            with tempfile.TemporaryDirectory() as folder:
                objects = []
                for name in ("runtime", "context", "memory", "asan", "arithmetic"):
                    objects.append(f"{folder}/{name}.o")
                    _compiler([*flags, "-c", str(HERE / f"{name}.cpp"), "-o", objects[-1]])
                link = ["-shared", "-nostdlib", f"-Wl,-soname,{target.name}"]
                _compiler([*link, *objects, "-o", str(partial)])
    return target


@cache
def load_runtime() -> ctypes.CDLL:
    """The emulator's run-time library, built on first use; one in a process."""
    # Kernels take their mathematical functions from the process.
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(_build_runtime()))
    library.mtl_buffer.restype = ctypes.c_void_p
    number, size = ctypes.c_int, ctypes.c_size_t
    library.mtl_buffer.argtypes = (number, ctypes.c_void_p, size, size, size, number)
    library.mtl_threadgroup_argument.restype = ctypes.c_void_p
    library.mtl_threadgroup_argument.argtypes = [ctypes.c_int, ctypes.c_size_t]
    library.mtl_error.restype = ctypes.c_char_p
    library.mtl_error_pc.restype = ctypes.c_uint64
    library.mtl_trace_records.restype = ctypes.c_size_t
    return library


def _compile_text(text: str, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.cpp"
        header = HERE / "include" / "mtl_launch.h"
        source.write_text(f'#include "{header}"\n{text}\n')
        _compiler([*_LANGUAGE, *_WARNINGS, *flags, str(source)])


def build_kernels(text: str, sanitize: bool, flush_half: bool, optimize: str) -> Path:
    """Compile rewritten source to a shared object, or find it in the cache."""
    runtime = load_runtime()._name
    flags = [*_processor(flush_half), optimize]
    flags += _SANITIZERS if sanitize else ["-fno-sanitize=all"]
    key = _digest(text, _own_text(), runtime, *_LANGUAGE, *flags)
    target = _cache_folder() / f"kernels-{key}.so"
    with _building(target) as partial:
        if partial:
            with tempfile.TemporaryDirectory() as folder:
                compiled = f"{folder}/kernels.o"
                _compile_text(text, [*flags, "-c", "-o", compiled])
                _compiler(["-shared", "-nostdlib", compiled, runtime, "-o", str(partial)])
    return target


def compile_only(text: str, *, address_spaces: bool) -> str:
    """Unoptimised LLVM text of rewritten source."""
    flags = ["-O0", "-fno-sanitize=all"] + ["-DMTL_ADDRESS_SPACES"] * address_spaces
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.ll"
        _compile_text(text, [*flags, "-S", "-emit-llvm", "-o", str(path)])
        return path.read_text()


def preprocess(
    source: str,
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    defines: Mapping[str, str] | None = None,
) -> str:
    """Metal source with its includes and macros expanded, and line markers kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "source.metal"
        path.write_text(source)
        flags = ["-E", "-x", "c++", "-std=c++14", "-nostdinc", "-nostdinc++"]
        flags += ["-D__METAL__=1", "-D__METAL_VERSION__=310"]
        flags += [f"-D{k}={v}" for k, v in (defines or {}).items()]
        flags += [f"-I{HERE / 'include' / 'prelude'}", *(f"-I{d}" for d in include_dirs)]
        text = _compiler([*flags, str(path)]).replace(str(path), "source.metal")
    allowed = [HERE / "include" / "prelude", *(Path(d) for d in include_dirs)]
    for file in re.findall(r'^# \d+ "([^"<]+)"', text, re.M):
        if file != "source.metal" and not any(
            Path(file).resolve().is_relative_to(d.resolve()) for d in allowed
        ):
            raise CompileError(f"Metal does not have <{Path(file).name}>")
    return text
