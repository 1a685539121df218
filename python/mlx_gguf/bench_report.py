"""What :mod:`mlx_gguf.bench` finds, and the circumstances it holds for."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from . import _ext
from ._abi import VERSION
from .plans import device_name

__all__ = ["Report", "Row", "Skipped", "circumstances", "quartiles", "to_json"]


@dataclass(frozen=True)
class Row:
    """One kind of product, measured.

    Bytes are those of the weights: x and the result stay in caches.

    Attributes
    ----------
    kernel : str
        ``"mlx-gguf"``, or what it is compared with.
    weights : str
        The tensor type, or how a rival stores them.
    N, K, M : int
        Rows of the weights, weights in one, rows of x.
    dtype : str
        Of x.
    nbytes : int
        Of one weight matrix.
    launches : int
        Products in one sample, which take weights in turns.
    seconds : float
        Of one product; the median of the samples.
    floor : float
        Seconds in which the device reads as many bytes and does nothing else (on CUDA by what a
        gigabyte takes); the median.
    over_floor : float
        The median of each sample's ratio to the read beside it.
    error : float
        ``||y - ref|| / ||ref||`` against the float64 product with the kernel's own weights,
        the largest of all samples.
    """

    kernel: str
    weights: str
    N: int
    K: int
    M: int
    dtype: str
    nbytes: int
    launches: int
    seconds: float
    floor: float
    over_floor: float
    error: float

    @property
    def gb_per_s(self) -> float:
        """Bytes of weights a second, in 1e9."""
        return self.nbytes / self.seconds / 1e9

    @property
    def intensity(self) -> float:
        """Operations for each byte of weights; a multiply-add is two."""
        return 2 * self.M * self.N * self.K / self.nbytes

    @property
    def gflop_per_s(self) -> float:
        """Operations a second, in 1e9."""
        return 2 * self.M * self.N * self.K / self.seconds / 1e9


@dataclass(frozen=True)
class Skipped:
    """A rival's product that was not measured, and why."""

    kernel: str
    case: str
    reason: str


@dataclass
class Report:
    """What :func:`mlx_gguf.bench.run` found.

    Attributes
    ----------
    backend : str
    rows : list of Row
    skipped : list of Skipped
    reads : list of float
        GB/s of reading 256 MiB and doing nothing else, once beside every row.
    peaks : dict of str to float
        GFLOP/s of arithmetic on registers, by kind; the best of the run, the main kind first.
    """

    backend: str
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)

    @property
    def memory_roof(self) -> float:
        """GB/s; the median of the reads."""
        return statistics.median(self.reads)

    @property
    def compute_roof(self) -> float:
        """GFLOP/s of the main kind of arithmetic."""
        return next(iter(self.peaks.values()))

    @property
    def ridge(self) -> float:
        """Operations for each byte from which arithmetic, not memory, is the bound."""
        return self.compute_roof / self.memory_roof


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The bounds of the middle half of some values."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, high


def to_json(found: Report) -> dict[str, Any]:
    """Everything that was found, and on what; what is derived is spelled out."""
    rows = [
        asdict(row)
        | {
            "gb_per_s": row.gb_per_s,
            "flop_per_byte": row.intensity,
            "gflop_per_s": row.gflop_per_s,
        }
        for row in found.rows
    ]
    return circumstances(found.backend) | {
        "memory_roof_gb_per_s": found.memory_roof,
        "reads_gb_per_s": found.reads,
        "compute_roofs_gflop_per_s": found.peaks,
        "rows": rows,
        "skipped": [asdict(skipped) for skipped in found.skipped],
    }


def circumstances(backend: str) -> dict[str, Any]:
    """The machine, the day and the versions that figures hold for."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "date": datetime.date.today().isoformat(),
        "backend": backend,
        "device": device_name(backend),
        "threads": _ext.cpu_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "huge_pages": huge.read_text().strip() if huge.exists() else None,
        "python": platform.python_version(),
        "mlx": _ext.running_mlx,
        "mlx_gguf": VERSION,
        "gguf": _version("gguf"),
        "llama_cpp_python": _version("llama-cpp-python"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
