"""Every kernel that can run on this machine, run and compared with gguf-py in float64."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import _ext, plans
from ._abi import CUDA_PROBLEM, VERSION
from .doctor_checks import Check, checks, cuda_products
from .reference import DTYPES, judge, same_bits

__all__ = ["Failure", "Report", "Section", "TypeRow", "diagnose", "sample_kernels"]


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
    """Check an instruction set, in a process of its own unless MLX_GGUF_ISA names it.

    A process keeps to one. In that of its own NumPy has one thread: others would look for work
    where ours want to run.
    """
    if os.environ.get("MLX_GGUF_ISA") == isa:
        return _section("cpu", f"cpu {isa}", qtypes, report)
    command = [sys.executable, "-m", "mlx_gguf.cli", "doctor", "--json", "--backend", "cpu"]
    done = subprocess.run(
        [*command, "--types", *qtypes],
        env=os.environ | {"MLX_GGUF_ISA": isa, "OPENBLAS_NUM_THREADS": "1"},
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
    if backend == "cuda":
        report(f"{name}: compiling")
        with contextlib.suppress(RuntimeError):  # the checks will say it
            products = (cuda_products(qtype, dtype) for qtype in qtypes for dtype in DTYPES)
            _ext.cuda_compile(list(itertools.chain.from_iterable(products)))
    try:
        for i, qtype in enumerate(qtypes):
            row = TypeRow(qtype)
            for dtype in DTYPES:
                for check in checks(backend, qtype, dtype):
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


def _outcome(check: Check, qtype: str) -> tuple[float, str | None]:
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


def to_json(report: Report) -> dict[str, Any]:
    """The report as data fit for JSON."""
    return asdict(report)
