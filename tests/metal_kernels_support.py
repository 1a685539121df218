"""Launches the kernels of metal/ in the emulator and computes what they must give."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from blocks import TYPES, dequantize64, random_blocks, row_bytes
from metal_emulator import Library

ROOT = Path(__file__).resolve().parent.parent
METAL = ROOT / "metal"
SOURCE = METAL / "kernels.metal"
# Must match struct Params of metal/params.h.
PARAMS = np.dtype(
    [
        *((n, "<u4") for n in ("M", "N", "K", "gather", "has_c")),
        *((n, "<f4") for n in ("alpha", "beta")),
        ("unused", "<u4"),
        *((n, "<u8") for n in ("x_step", "w_step", "c_step", "y_step")),
    ]
)
# Bound on ||y - ref|| / ||ref|| that the output's rounding alone may use up: half an ulp.
ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Kernel:
    """A kernel that the host's grammar can form, as csrc/metal/ describes it."""

    name: str
    instantiation: str
    kernel: str
    form: str
    rows: int
    columns: int
    split_k: bool
    transpose: bool
    format: str
    x: str
    tile: tuple[int, int]
    threads: int

    def launch(self, width: int, height: int, depth: int, simdgroups: int = 2):
        """Grid and threads for `width` by `height` outputs and `depth` batch entries."""
        columns, rows, threads = *self.tile, self.threads
        if self.kernel == "gemv":
            columns = self.rows if self.split_k else self.rows * simdgroups
            threads = 32 * simdgroups
        return (-(-width // columns), -(-height // rows), depth), (threads, 1, 1)


_FOLDER = tempfile.TemporaryDirectory(prefix="mlx-gguf-metal-")


@cache
def _list_tool() -> Path:
    """tests/metal_kernels_list.cpp, compiled."""
    import mlx

    csrc = ROOT / "csrc"
    sources = [Path(__file__).with_name("metal_kernels_list.cpp")]
    sources += [csrc / f"{n}.cpp" for n in ("formats", "metal/names", "metal/plan")]
    includes = [f"-I{p}" for p in (csrc, *(Path(p) / "include" for p in mlx.__path__))]
    found = shutil.which("c++")
    compiler = [found] if found else [sys.executable, "-m", "ziglang", "c++"]
    target = Path(_FOLDER.name) / "list"
    arguments = ["-std=c++20", "-O0", *includes, *map(str, sources), "-o", str(target)]
    subprocess.run([*compiler, *arguments], check=True)
    return target


@cache
def kernels() -> tuple[Kernel, ...]:
    """Every kernel of the grammar."""
    lines = subprocess.run([_list_tool()], capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in lines.splitlines()]
    return tuple(Kernel(**{**row, "tile": tuple(row["tile"])}) for row in rows)


def choose(problems: list[tuple]) -> list[tuple[str, int, str]]:
    """Kernel name, simdgroups and plan for each problem; see metal_kernels_list.cpp."""
    text = "\n".join(
        " ".join(str(int(v) if isinstance(v, bool) else v) for v in p) for p in problems
    )
    done = subprocess.run(
        [_list_tool(), "-"], input=text, capture_output=True, text=True, check=True
    )
    split = [line.split(" ", 2) for line in done.stdout.splitlines()]
    return [(name, int(simdgroups), plan) for name, simdgroups, plan in split]


def library(chosen: list[Kernel], edit=None, **options) -> Library:
    """Compile kernels; `edit` maps a file's name in metal/ and its text to another text."""
    lines = "".join(k.instantiation + "\n" for k in chosen)
    if edit is None:
        return Library(SOURCE.read_text() + lines, include_dirs=[METAL], **options)
    with tempfile.TemporaryDirectory() as folder:
        for path in METAL.rglob("*.*"):
            at = Path(folder) / path.relative_to(METAL)
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(edit(path.relative_to(METAL).as_posix(), path.read_text()))
        source = (Path(folder) / SOURCE.name).read_text()
        return Library(source + lines, include_dirs=[folder], **options)


_POOL = ThreadPoolExecutor(2)
_BUILDS: dict[str, Future[Library]] = {}


def _build(qtype: str) -> Library:
    # Unoptimised code is compiled several times faster and runs fast enough.
    return library([k for k in kernels() if k.format == qtype], optimize="-O0")


def library_of(qtype: str) -> Library:
    """All kernels of a type. The next type's are compiled meanwhile."""
    order = list(TYPES)
    at = order.index(qtype)
    for name in order[at : at + 2]:
        if name not in _BUILDS:
            _BUILDS[name] = _POOL.submit(_build, name)
    return _BUILDS[qtype].result()


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 to what a buffer of `dtype` holds; bf16 as its bits."""
    if dtype == "bf16":
        bits = values.astype("<f4").view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return values.astype({"f16": "<f2", "f32": "<f4"}[dtype])


def widen(values: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of `narrow`."""
    if dtype == "bf16":
        return (values.astype("<u4") << 16).view("<f4").astype(np.float64)
    return values.astype(np.float64)


@dataclass
class Problem:
    """Inputs of one launch: `batch` products of x [M, depth] with w [N, K]."""

    kernel: Kernel
    M: int
    N: int
    K: int
    x: np.ndarray  # [x matrices, M, depth]
    w: np.ndarray  # [w matrices, N, row bytes]
    lhs: np.ndarray | None = None  # which matrix each product takes; None: all alike
    rhs: np.ndarray | None = None
    batch: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    c: np.ndarray | None = None

    @property
    def width(self) -> int:
        return self.N if self.kernel.transpose else self.K

    def weights(self) -> np.ndarray:
        return dequantize64(self.w, self.kernel.format)

    def picked(self) -> tuple[np.ndarray, np.ndarray]:
        """x [batch, M, depth] and decoded w [batch, N, K] of every product, as float64."""
        x, w = widen(self.x, self.kernel.x), self.weights()
        every = np.arange(self.batch)
        lhs = self.lhs if self.lhs is not None else every % len(x)
        rhs = self.rhs if self.rhs is not None else every % len(w)
        return x[lhs], w[rhs]

    def expected(self) -> tuple[np.ndarray, float]:
        """y in float64 [batch, M, width], and the size its errors are relative to.

        That is ||y||, or what it is likely to be with products of random sign where y is so
        small that a few of them may cancel.
        """
        x, w = self.picked()
        if self.kernel.transpose:
            w = np.swapaxes(w, 1, 2)
        with np.errstate(all="ignore"):
            y = self.alpha * (x @ w)
            square = self.alpha**2 * np.sum((x * x) @ (w * w))
        if self.c is not None:
            y = y + self.beta * widen(self.c, self.kernel.x)
        return y, float(max(np.linalg.norm(y), np.sqrt(square)))

    def run(self, lib: Library, simdgroups: int = 2, **options) -> np.ndarray:
        """y [batch, M, width] as the buffer holds it."""
        k = self.kernel
        sorted_rows = k.kernel == "gather_gemm"
        p = np.zeros((), PARAMS)
        p["M"], p["N"], p["K"] = self.batch if sorted_rows else self.M, self.N, self.K
        p["gather"] = self.lhs is not None
        p["has_c"], p["alpha"], p["beta"] = self.c is not None, self.alpha, self.beta
        p["x_step"] = self.x[0].size if len(self.x) > 1 or sorted_rows else 0
        p["w_step"] = self.w[0].size if len(self.w) > 1 or sorted_rows else 0
        p["y_step"] = p["c_step"] = self.M * self.width
        if k.x == "bf16":
            y = np.full((self.batch, self.M, self.width), 0x7FC0, "<u2")
        else:
            y = np.full((self.batch, self.M, self.width), np.nan, self.x.dtype)
        none = np.zeros(0, "<u4")
        buffers = {
            0: _frozen(self.w),
            1: _frozen(self.x),
            2: _frozen(self.c if self.c is not None else np.zeros(0, self.x.dtype)),
            3: y,
            4: p.tobytes(),
            5: _frozen(none if self.lhs is None else self.lhs.astype("<u4")),
            6: _frozen(none if self.rhs is None else self.rhs.astype("<u4")),
        }
        height, depth = (self.batch, 1) if sorted_rows else (self.M, self.batch)
        grid, threads = k.launch(self.width, height, depth, simdgroups)
        lib.run(k.name, grid, threads, buffers, **options)
        return y

    def error(self, y: np.ndarray) -> float:
        """Error of y as a share of what is allowed: at most 1 for a right result."""
        expected, size = self.expected()
        got = widen(y, self.kernel.x)
        if not np.isfinite(got).all():
            return float("inf")
        allowed = TOLERANCE * size + ROUNDING[self.kernel.x] * np.linalg.norm(expected)
        return float(np.linalg.norm(got - expected) / allowed)


def _frozen(array: np.ndarray) -> np.ndarray:
    """A copy whose buffer the kernel must not change."""
    array = array.copy()
    array.flags.writeable = False
    return array


def random_problem(
    kernel: Kernel,
    M: int,
    N: int,
    K: int,
    rng: np.random.Generator,
    *,
    batch: int = 1,
    gather: bool = False,
    with_c: bool = False,
    extreme: bool = False,
) -> Problem:
    """Random inputs; with `gather` out of 3 matrices of x and of w."""
    matrices = 3 if gather else batch
    depth = K if kernel.transpose else N
    w = random_blocks(kernel.format, matrices * N, K, rng, extreme=extreme)
    problem = Problem(
        kernel,
        M,
        N,
        K,
        x=narrow(rng.standard_normal((matrices, M, depth)), kernel.x),
        w=w.reshape(matrices, N, row_bytes(kernel.format, K)),
        batch=batch,
    )
    if gather:
        problem.lhs = rng.integers(0, matrices, batch)
        problem.rhs = rng.integers(0, matrices, batch)
        if kernel.kernel == "gather_gemm":
            problem.rhs.sort()
    if with_c:
        problem.alpha, problem.beta = 0.5, -2.0
        c = rng.standard_normal((batch, M, problem.width))
        problem.c = narrow(c, kernel.x)
    return problem
