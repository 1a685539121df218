"""Memory transactions of the Metal gemv kernels, counted in the emulator.

`python tests/metal_kernels_traffic.py [TYPE ...]` prints, for w of each kernel: bytes loaded over
bytes there are, by all lanes and counted once where the lanes of a simdgroup load the same byte
together; and the share of the loaded bytes by the length of the piece a lane loads in one go.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from blocks import TYPES
from metal_emulator import Library
from metal_kernels_support import Kernel, kernels, library, random_problem


@dataclass(frozen=True)
class Traffic:
    """Loads of w in one launch."""

    kernel: Kernel
    size: int  # bytes of w
    loaded: int  # by all lanes
    fetched: int  # the same, what lanes load together counted once
    times: np.ndarray  # how often each byte was loaded by a lane
    fetches: np.ndarray  # how often each byte was fetched by a simdgroup
    runs: dict[int, int]  # pieces of contiguous bytes a lane loads: length to count


class _Tracer:
    """Stands in for a library: runs with a trace and keeps the report."""

    def __init__(self, lib: Library) -> None:
        self._lib = lib

    def run(self, *args, **options) -> None:
        self.report = self._lib.trace(*args, **options)


def measure(lib: Library, kernel: Kernel, N: int, K: int) -> Traffic:
    """Trace a launch with as many rows of x as the kernel has columns."""
    tracer = _Tracer(lib)
    problem = random_problem(kernel, kernel.columns, N, K, np.random.default_rng(0))
    problem.run(tracer)
    report = tracer.report
    size = problem.w.nbytes
    records = report.records
    loads = records[(records["buffer"] == 0) & (records["store"] == 0)]
    nth = _repetition(loads)
    times = np.zeros(size, np.int64)
    fetches = np.zeros(size, np.int64)
    for byte in range(int(loads["size"].max())):
        part = loads["size"] > byte
        at = loads["offset"][part] + byte
        np.add.at(times, at, 1)
        simdgroup = loads["threadgroup"].astype(np.int64) * 32 + loads["thread"] // 32
        keys = np.stack([simdgroup[part], loads["pc"][part], nth[part], at])
        unique = np.unique(keys, axis=1)
        np.add.at(fetches, unique[3], 1)
    return Traffic(
        kernel, size, int(times.sum()), int(fetches.sum()), times, fetches, report[0].runs
    )


def _repetition(loads: np.ndarray) -> np.ndarray:
    """Which execution of its instruction by its lane each load is."""
    order = np.lexsort((loads["pc"], loads["thread"], loads["threadgroup"]))  # stable
    s = loads[order]
    fields = ("threadgroup", "thread", "pc")
    same = np.logical_and.reduce([s[f][1:] == s[f][:-1] for f in fields])
    starts = np.concatenate(([0], np.flatnonzero(~same) + 1))
    lengths = np.diff(np.concatenate((starts, [len(s)])))
    nth = np.empty(len(s), np.int64)
    nth[order] = np.arange(len(s)) - np.repeat(starts, lengths)
    return nth


def shown(kernel: Kernel) -> bool:
    """One kernel for each type and form: the others load in the same way."""
    return (
        kernel.kernel == "gemv"
        and kernel.x == "f16"
        and (kernel.rows, kernel.columns, kernel.split_k) == (2, 1, False)
    )


def main() -> None:
    types = sys.argv[1:] or list(TYPES)
    chosen = [k for k in kernels() if shown(k) and k.format in types]
    lib = library(chosen)
    print(f"{'type':8} {'form':10} {'loaded':>7} {'fetched':>8}  bytes of a piece: share")
    for kernel in chosen:
        t = measure(lib, kernel, 4, 2048)
        total = sum(length * count for length, count in t.runs.items())
        shares = ", ".join(f"{n}: {n * c / total:.0%}" for n, c in t.runs.items())
        print(
            f"{kernel.format:8} {kernel.form:10} {t.loaded / t.size:7.3f} "
            f"{t.fetched / t.size:8.3f}  {shares}"
        )


if __name__ == "__main__":
    main()
