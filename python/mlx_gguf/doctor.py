"""Every kernel that can run on this machine, run and compared with gguf-py in float64."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import _ext, plans
from ._abi import CUDA_PROBLEM, VERSION
from .reference import DTYPES, RandomWeights, activations, judge, same_bits

__all__ = ["Failure", "Report", "Section", "TypeRow", "diagnose", "sample_kernels"]

# Odd numbers of rows and of blocks; several steps of every kernel along K and a tail.
_EXPERTS, _N, _BLOCKS = 3, 35, {256: 5, 32: 41, 1: 1283}
_ROWS = 33  # of x in a gemm: a tile and a row
_MANY = 513  # for which csrc/metal/plan.cpp takes MLX's matmul
# Rows of x, N and K for which csrc/cuda/choose.cpp writes weights out in x's dtype.
_DENSE = 256, 1031, 1280


@dataclass(frozen=True)
class Failure:
    """A check that did not pass: where, and what came out."""

    backend: str
    qtype: str
    dtype: str
    path: str
    problem: str


@dataclass
class TypeRow:
    """All checks of one type on one backend.

    Attributes
    ----------
    qtype : str
    checks, failed : int
    errors : dict of str to float
        The worst relative error of a result, by the dtype of activations; for float16 and
        bfloat16 nearly all of it is the rounding to that dtype.
    """

    qtype: str
    checks: int = 0
    failed: int = 0
    errors: dict[str, float] = field(default_factory=dict)


@dataclass
class Section:
    """One backend; of the CPU, one instruction set.

    Attributes
    ----------
    name : str
        Such as ``"cpu avx2"``.
    unavailable : str or None
        Why it did not run, if so.
    types : list of TypeRow
    """

    name: str
    unavailable: str | None = None
    types: list[TypeRow] = field(default_factory=list)


@dataclass
class Report:
    """What :func:`diagnose` found; ``asdict`` makes it fit for JSON."""

    versions: dict[str, str]
    sections: list[Section]
    failures: list[Failure]


@dataclass(frozen=True)
class _Check:
    """A result, the right one, and what the sum of the terms' magnitudes was."""

    path: str
    result: Callable[[], mx.array]
    ref: np.ndarray
    terms: np.ndarray
    solo: Callable[[], mx.array] | None = None  # must have the same bits
    tolerance: float | None = None  # if it is not the type's


def diagnose(
    *,
    backends: Sequence[str] = ("cpu", "metal", "cuda"),
    types: Sequence[str] = (),
    report: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run every kernel of this machine's backends and compare the results.

    A kernel runs for its type and each dtype of activations, whether or not it would be chosen:
    all plans, for one row of activations, a few and many, both ways round, with an addend,
    for experts, and as numbers and rows of an embedding. Rows of small batches must equal their
    solo runs to the bit.

    Parameters
    ----------
    backends : sequence of str, optional
        Names to look at. Default: all there are anywhere.
    types : sequence of str, optional
        Names of tensor types. Default: all with kernels.
    report : callable, optional
        Is told what is being done.

    Returns
    -------
    Report
    """
    names = [_ext.find_format(t) for t in types] if types else _ext.formats()
    qtypes = [f.name for f in names if f is not None and f.supported]
    out = Report(versions(), [], [])
    for backend in backends:
        if backend == "cpu":
            for isa in _isas():
                report(f"cpu {isa}")
                _merge(out, _cpu_section(isa, qtypes, report))
        elif backend in _ext.backends():
            _merge(out, _section(backend, backend, qtypes, report))
        else:
            out.sections.append(Section(backend, _reason(backend)))
    return out


def versions() -> dict[str, str]:
    """What an issue should say of the machine and its software."""
    out = {
        "mlx-gguf": VERSION,
        "mlx": f"{_ext.running_mlx} (built against {_ext.built_with_mlx})",
        "nanobind": _ext.built_with_nanobind,
        "gguf": metadata.version("gguf"),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "cpu": f"{plans.device_name('cpu')}, {_ext.cpu_threads()} threads",
    }
    for backend in _ext.backends():
        if backend != "cpu":
            architecture = mx.device_info(mx.gpu).get("architecture")
            out[backend] = f"{plans.device_name(backend)} ({architecture})"
    out |= _cuda_versions()
    out["stored plans"] = str(len(_ext.stored_plans()))
    return out


def _cuda_versions() -> dict[str, str]:
    """Of a loaded CUDA backend: what its kernels are compiled by and for, and kept in."""
    info = _ext.cuda_info()
    if not info:
        return {}
    driver = Path("/proc/driver/nvidia/version")
    first = driver.read_text().splitlines()[0].split() if driver.exists() else []
    version = next((word for word in first if word[0].isdigit() and "." in word), "unknown")
    files = list(Path(info["cache"]).glob("*.cubin"))
    size = sum(file.stat().st_size for file in files)
    return {
        "cuda device": f"compute capability {info['compute capability']}, "
        f"{info['multiprocessors']} multiprocessors",
        "cuda driver": f"{version} (CUDA {info['driver CUDA']})",
        "NVRTC": f"{info['NVRTC']}, {info['NVRTC file']}",
        "CUDA cache": f"{info['cache']}: {len(files)} kernels, {size / 1e6:.1f} MB",
    }


def sample_kernels() -> set[str]:
    """Names of the Metal kernels that the checks run: all, whether or not Metal is here."""
    return {"gguf_half_test"} | {
        _ext.metal_kernel_name(plan, format.name, dtype)
        for format in _ext.formats()
        if format.supported
        for plan in _ext.plan_candidates("metal", format.name)
        for dtype in DTYPES
    }


def _isas() -> tuple[str, ...]:
    chosen = os.environ.get("MLX_GGUF_ISA")
    return tuple(_ext.cpu_isas()) if chosen is None else (chosen,)


def _reason(backend: str) -> str:
    if backend == "cuda":
        return CUDA_PROBLEM or "its backend is not loaded"
    if backend == "metal" and mx.metal.is_available():
        return "this build of mlx-gguf has no Metal kernels"
    return f"this machine's MLX has no {backend.title()}"


def _merge(out: Report, part: Report) -> None:
    out.sections += part.sections
    out.failures += part.failures


def _cpu_section(isa: str, qtypes: Sequence[str], report: Callable[[str], None]) -> Report:
    """Check an instruction set; a process keeps to one, so others get a process of theirs."""
    if isa == _ext.cpu_isa():
        return _section("cpu", f"cpu {isa}", qtypes, report)
    command = [sys.executable, "-m", "mlx_gguf.cli", "doctor", "--json", "--backend", "cpu"]
    done = subprocess.run(
        [*command, "--types", *qtypes],
        env=os.environ | {"MLX_GGUF_ISA": isa},
        capture_output=True,
        text=True,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        problem = f"exit code {done.returncode}: {done.stderr.strip()[-200:]}"
        failure = Failure(f"cpu {isa}", "all", "all", "start", problem)
        return Report({}, [Section(f"cpu {isa}")], [failure])
    return Report(
        {},
        [
            Section(s["name"], s["unavailable"], [TypeRow(**row) for row in s["types"]])
            for s in found["sections"]
        ],
        [Failure(**failure) for failure in found["failures"]],
    )


def _section(
    backend: str, name: str, qtypes: Sequence[str], report: Callable[[str], None]
) -> Report:
    section, failures = Section(name), []
    before = _ext.stored_plans()
    try:
        for i, qtype in enumerate(qtypes):
            row = TypeRow(qtype)
            for dtype in DTYPES:
                for check in _checks(backend, qtype, dtype):
                    report(f"{name} {qtype}, {i + 1} of {len(qtypes)}: {dtype} {check.path}")
                    error, problem = _outcome(check, qtype)
                    row.checks += 1
                    row.errors[dtype] = max(row.errors.get(dtype, 0.0), error)
                    if problem is not None:
                        row.failed += 1
                        failures.append(Failure(name, qtype, dtype, check.path, problem))
            section.types.append(row)
    finally:
        _ext.clear_plans()
        for stored in before:
            _ext.set_plans(**stored)
    return Report({}, [section], failures)


def _outcome(check: _Check, qtype: str) -> tuple[float, str | None]:
    format = _ext.find_format(qtype)
    assert format is not None
    try:
        y = check.result()
        mx.eval(y)
        tolerance = format.tolerance if check.tolerance is None else check.tolerance
        verdict = judge(y, check.ref, check.terms, tolerance)
        if verdict.problem is None and check.solo and not same_bits(y, check.solo()):
            return verdict.error, "rows differ from their solo runs"
    except RuntimeError as error:  # of a compiler, most of all
        return 0.0, " ".join(str(error).split())
    return verdict.error, verdict.problem


class _Samples:
    """Operands of all checks of one type and dtype, with their numbers in float64."""

    def __init__(self, backend: str, qtype: str, dtype: str):
        rng = np.random.default_rng(0)
        format = _ext.find_format(qtype)
        assert format is not None
        self.backend, self.qtype, self.dtype = backend, qtype, dtype
        self.stream = mx.cpu if backend == "cpu" else mx.gpu
        self.K = _BLOCKS[format.block_size] * format.block_size
        weights = RandomWeights(qtype, (_EXPERTS, _N, self.K), rng)
        self.w, self.w64 = mx.array(weights.packed), weights.values()
        self.x, self.x64 = activations((_MANY, self.K), dtype, rng)
        self.z, self.z64 = activations((_MANY, _N), dtype, rng)
        self.c, self.c64 = activations((_MANY, _N), dtype, rng)
        self.experts = rng.integers(0, _EXPERTS, _ROWS)
        self.places = rng.integers(0, _N, 7)

    def use(self, plan: _ext.Plan, rows: Sequence[int]) -> None:
        plans = dict.fromkeys(rows, str(plan))
        _ext.set_plans(self.backend, self.qtype, self.dtype, _N, self.K, plans)

    def matmul(self, x: mx.array, transpose: bool = True) -> mx.array:
        return _ext.quantized_matmul(x, self.w[0], self.qtype, transpose, stream=self.stream)

    def solo(self, M: int) -> mx.array:
        rows = [self.matmul(self.x[m : m + 1]) for m in range(M)]
        return mx.concatenate(rows, stream=self.stream)

    def gather(self, experts: np.ndarray, x: mx.array, **options: Any) -> mx.array:
        return _ext.gather_qmm(
            x[:, None], self.w, self.qtype, None, mx.array(experts), stream=self.stream, **options
        )

    def product(self, name: str, M: int, *, transpose: bool = True, solo: bool = False) -> _Check:
        x, x64 = (self.x, self.x64) if transpose else (self.z, self.z64)
        w = self.w64[0].T if transpose else self.w64[0]
        return _Check(
            f"{name} M={M}" + ("" if transpose else " x @ W"),
            lambda: self.matmul(x[:M], transpose),
            x64[:M] @ w,
            abs(x64[:M]) @ abs(w),
            (lambda: self.solo(M)) if solo else None,
        )

    def addmm(self, M: int) -> _Check:
        x, c, w = self.x64[:M], self.c64[:M], self.w64[0].T
        return _Check(
            f"addmm M={M}",
            lambda: _ext.quantized_addmm(
                self.c[:M], self.x[:M], self.w[0], self.qtype, 0.5, 2.0, stream=self.stream
            ),
            0.5 * (x @ w) + 2.0 * c,
            0.5 * (abs(x) @ abs(w)) + 2.0 * abs(c),
        )

    def gathered(self, name: str, *, ascending: bool, transpose: bool = True) -> _Check:
        experts = np.sort(self.experts) if ascending else self.experts
        x, x64 = (self.x, self.x64) if transpose else (self.z, self.z64)
        x, x64 = x[:_ROWS], x64[:_ROWS]
        w = self.w64[experts]
        rule = "mk,mnk->mn" if transpose else "mn,mnk->mk"
        return _Check(
            name + ("" if transpose else " x @ W"),
            lambda: self.gather(experts, x, transpose=transpose, sorted_indices=ascending),
            np.einsum(rule, x64, w)[:, None],
            np.einsum(rule, abs(x64), abs(w))[:, None],
        )

    def numbers(self, name: str, places: np.ndarray) -> _Check:
        def result() -> mx.array:
            w = mx.take(self.w[0], mx.array(places), 0, stream=self.stream)
            dtype = getattr(mx, self.dtype)
            return _ext.dequantize(w, self.qtype, dtype, stream=self.stream)

        values = self.w64[0][places]
        return _Check(name, result, values, abs(values))


def _checks(backend: str, qtype: str, dtype: str) -> Iterator[_Check]:
    """First the kernels that are chosen by themselves, then each plan by force.

    A check must be done with when the next one is asked for: plans are stored in between.
    """
    s = _Samples(backend, qtype, dtype)
    _ext.clear_plans()
    yield s.product("gemv", 1)
    for M in range(2, 9):
        yield s.product("gemv", M, solo=True)
    yield s.product("gemm", 1, transpose=False)
    for name, M in (("gemm", _ROWS), ("matmul", _MANY)):
        yield s.product(name, M)
        yield s.product(name, M, transpose=False)
    for M in (1, _ROWS, _MANY):
        yield s.addmm(M)
    yield s.gathered("gather", ascending=False)
    yield s.gathered("gather", ascending=False, transpose=False)
    yield s.gathered("sorted gather", ascending=True)
    yield s.gathered("sorted gather", ascending=True, transpose=False)
    yield s.numbers("dequantize", np.arange(_N))
    yield s.numbers("embedding", s.places)
    if backend == "cuda":  # its plans follow from the problem alone
        yield from _rounded(s)
        return
    for plan in _ext.plan_candidates(backend, qtype):
        _ext.clear_plans()
        # A kernel's name, or the plan of a backend whose kernels take it as a number.
        name = str(plan) if backend == "cpu" else _kernel(plan, qtype, dtype)
        if plan.kernel == "gemv":
            s.use(plan, (1, 2, 4, 8))
            for M in sorted({1, plan.columns, max(1, plan.columns - 1)}):
                yield s.product(name, M, solo=M > 1)
        elif plan.kernel == "gemm":
            s.use(plan, (64,))  # what _ROWS round up to
            yield s.product(name, _ROWS, transpose=plan.transpose)
        elif plan.kernel == "gather_gemm":
            s.use(plan, (1,))  # an expert's rows come one by one
            yield s.gathered(name, ascending=True, transpose=plan.transpose)


def _rounded(s: _Samples) -> Iterator[_Check]:
    """A product of so many rows that its weights are rounded to x's dtype first."""
    format = _ext.find_format(s.qtype)
    assert format is not None
    if not format.packed or s.dtype == "float32":
        return
    rng, (M, N, K) = np.random.default_rng(1), _DENSE
    weights = RandomWeights(s.qtype, (N, K), rng)
    x, x64 = activations((M, K), s.dtype, rng)
    w = mx.array(weights.packed)
    yield _Check(
        f"dense M={M}",
        lambda: _ext.quantized_matmul(x, w, s.qtype, stream=s.stream),
        *weights.product(x64),
        tolerance=format.tolerance + DTYPES[s.dtype][0],
    )


def _kernel(plan: _ext.Plan, qtype: str, dtype: str) -> str:
    name = _ext.metal_kernel_name(plan, qtype, dtype)
    return f"{name} ({plan})" if plan.kernel == "gemv" else name


def to_json(report: Report) -> dict[str, Any]:
    """The report as data fit for JSON."""
    return asdict(report)
