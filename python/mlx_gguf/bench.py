"""Products on weights from memory, checked, timed, and held against the machine's roofs.

Every measurement alternates with a read of as many other weights, so that both see the same
moments of the machine; see :func:`run`.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from . import _ext
from .bench_report import Report, Row, Skipped
from .reference import DTYPES, RandomWeights, activations, judge, same_bits, tolerance
from .roofline import Device, find_device
from .tune import Matrix

__all__ = ["WrongResultError", "run"]

OURS = "mlx-gguf"
# One evaluation holds products until it takes this long, so that it is their time alone.
_SAMPLE_SECONDS = 0.02
# Of copies of a matrix: several times the last-level cache of CPUs and GPUs, or what a guest
# gets of it where the system reports that of a whole socket.
_COLD_BYTES = 512 << 20
# Samples of slow rivals are fewer: no less than three, and no more of them than take this.
_ROUNDS_SECONDS, _FEWEST_ROUNDS = 2.0, 3
_READ_BYTES = 64 << 20  # of a floor's sample, at least
_ROOF_BYTES = 256 << 20
_CHECKED_ROWS = 8  # of x, where there are more


class WrongResultError(RuntimeError):
    """A product that was timed is wrong, and so its time is of no interest."""


class Launch(Protocol):
    """Products that are ready to run."""

    def run(self) -> None:
        """Compute all of them; this is what is timed."""

    def results(self) -> list[mx.array]:
        """What came out, each ``[M, N]``."""


@dataclass(frozen=True)
class Contender:
    """A kernel with copies of its weights.

    Attributes
    ----------
    kernel, weights, dtype : str
        As in :class:`Row`.
    nbytes : int
        Of one copy.
    copies : list of sequence of array
        What a product reads, for the read floor.
    prepare : callable
        Gets the numbers of copies and makes a launch of one product with each.
    error : callable
        The relative error of a result; raises WrongResultError where it may not be as large.
    """

    kernel: str
    weights: str
    dtype: str
    nbytes: int
    copies: Sequence[Sequence[mx.array]]
    prepare: Callable[[Sequence[int]], Launch]
    error: Callable[[mx.array], float]


class MLXLaunch:
    """Products that are MLX operations."""

    def __init__(self, outputs: list[mx.array]):
        self._outputs = outputs

    def run(self) -> None:
        mx.eval(self._outputs)

    def results(self) -> list[mx.array]:
        return self._outputs


def run(
    matrices: Sequence[Matrix],
    *,
    backend: str = "cpu",
    rows: Sequence[int] = (1,),
    dtypes: Sequence[str] = (),
    compare: bool = False,
    rounds: int = 7,
    report: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure products with random matrices, and what else can be done with their numbers.

    The copies of a matrix are more than caches hold, and taken in turns. A sample is one
    evaluation of several products, each with another copy, that takes about 20 ms: what it takes
    to start one is not measured. (On CUDA copies come again after all others.) Between samples the
    device reads as many bytes and does nothing else. Every result that was timed is checked: one
    against gguf-py in float64 (eight rows, if x has more), the others against that one, to the bit.

    Parameters
    ----------
    matrices : sequence of Matrix
    backend : str, optional
    rows : sequence of int, optional
        Numbers of rows of x. Default: 1.
    dtypes : sequence of str, optional
        Of x. Default: that of a model loaded without naming one.
    compare : bool, optional
        Whether to measure rivals that are installed, too. Default: no.
    rounds : int, optional
        Samples of each product. Default: 7.
    report : callable, optional
        Is told what is being done.

    Raises
    ------
    ValueError
        A backend that is not here, or a type without kernels.
    WrongResultError
        A kernel of ours gave a wrong result.
    """
    device = find_device(backend)
    found = Report(backend)
    for group in _by_shape(matrices):
        cases = list(itertools.product(dtypes or (device.dtype,), rows))
        for matrix in group:
            bench = _Bench(matrix, device, found, rounds, report)
            bench.measure(cases, compare)
            weights = bench.weights
            del bench  # before the rivals' weights are made
        if compare:
            _measure_mlx(group[-1], weights, cases, device, found, rounds, report)
    return found


def _by_shape(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    groups: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        groups.setdefault((matrix.N, matrix.K), []).append(matrix)
    return list(groups.values())


class _Bench:
    """One matrix in as many copies as no cache holds."""

    def __init__(
        self,
        matrix: Matrix,
        device: Device,
        found: Report,
        rounds: int,
        report: Callable[[str], None],
    ):
        self.matrix, self.device, self.found, self.rounds = matrix, device, found, rounds
        self._name = f"{matrix.qtype} {matrix.N} x {matrix.K}"
        self._report = report
        report(f"{self._name}: making weights")
        self._rng = np.random.default_rng(0)
        self.weights = RandomWeights(matrix.qtype, (matrix.N, matrix.K), self._rng)
        packed = mx.array(self.weights.packed)
        # Made by the device, and so in its own memory.
        count = count_copies(matrix.nbytes)
        self.copies = [mx.add(packed, 0, stream=device.stream) for _ in range(count)]
        mx.eval(self.copies)

    def measure(self, cases: Sequence[tuple[str, int]], compare: bool) -> None:
        from . import bench_ggml

        with ExitStack() as stack:
            rival = None
            if compare and self.found.backend == "cpu" and bench_ggml.installed():
                self._report(f"{self._name}: weights of ggml")
                weights = bench_ggml.Weights(self.matrix, self.weights, self.copies)
                rival = stack.enter_context(weights)
            for dtype, M in cases:
                contenders = [self._ours(dtype, M)]
                if rival and dtype == cases[0][0]:  # ggml has an x of its own
                    contenders.append(rival.contender(M, self._rng))
                kernels = " and ".join(c.kernel for c in contenders)
                self._report(f"{self._name}, {M} row{'s' * (M > 1)} of {dtype}: {kernels}")
                shape = self.matrix.N, self.matrix.K, M
                measure(contenders, shape, self.device, self.found, self.rounds)

    def _ours(self, dtype: str, M: int) -> Contender:
        qtype, stream = self.matrix.qtype, self.device.stream
        x, x64 = activations((M, self.matrix.K), dtype, self._rng, normal=True)
        at = checked_rows(M)
        ref, terms = self.weights.product(x64[at])
        allowed = tolerance(qtype, dtype, self.found.backend)
        if self.found.backend == "cuda" and self._rounds_weights(dtype, M):
            allowed += DTYPES[dtype][0]

        def prepare(numbers: Sequence[int]) -> Launch:
            ws = (self.copies[i] for i in numbers)
            return MLXLaunch([_ext.quantized_matmul(x, w, qtype, stream=stream) for w in ws])

        def error(y: mx.array) -> float:
            verdict = judge(y[mx.array(at)], ref, terms, allowed)
            if verdict.problem:
                raise WrongResultError(
                    f"[bench] Expected {self._name} with {M} row{'s' * (M > 1)} of {dtype} as in "
                    f"float64. Received {verdict.problem}; run: mlx-gguf doctor."
                )
            return verdict.error

        copies = [(w,) for w in self.copies]
        return Contender(OURS, qtype, dtype, self.matrix.nbytes, copies, prepare, error)

    def _rounds_weights(self, dtype: str, M: int) -> bool:
        # The variable is the CUDA backend's own (csrc/cuda/module.cpp).
        plan = _ext.cuda_plan_for(self.matrix.qtype, dtype, M, self.matrix.N, self.matrix.K)
        return plan == "dense" and os.environ.get("MLX_GGUF_CUDA_DENSE") != "0"


def _measure_mlx(
    matrix: Matrix,
    weights: RandomWeights,
    cases: Sequence[tuple[str, int]],
    device: Device,
    found: Report,
    rounds: int,
    report: Callable[[str], None],
) -> None:
    from . import bench_rivals

    chosen = [
        (rival, rival.dtype or dtype, M) for rival in bench_rivals.RIVALS for dtype, M in cases
    ]
    for rival, dtype, M in dict.fromkeys(chosen):
        case = f"{matrix.N} x {matrix.K}, {M} row{'s' * (M > 1)} of {dtype}"
        report(f"{case}: {rival.kernel}")
        made = bench_rivals.contender(rival, matrix, weights, dtype, M, device)
        if isinstance(made, Contender):
            measure([made], (matrix.N, matrix.K, M), device, found, rounds)
        else:
            found.skipped.append(Skipped(f"{rival.kernel} {rival.weights}", case, made))


def count_copies(nbytes: int) -> int:
    """How many arrays of a size no cache holds; two at least, to take turns."""
    return max(2, math.ceil(_COLD_BYTES / nbytes))


def checked_rows(M: int) -> list[int]:
    """The rows of x whose results are compared with float64: the ends and some between."""
    return sorted({round(m) for m in np.linspace(0, M - 1, min(M, _CHECKED_ROWS))})


def measure(
    contenders: Sequence[Contender],
    shape: tuple[int, int, int],
    device: Device,
    found: Report,
    rounds: int,
) -> None:
    """Measure kernels on N, K, M, in turns, and add a row for each to what was found."""
    trials = [_Trial(contender, device, rounds) for contender in contenders]
    for i in range(max(trial.rounds for trial in trials)):
        for trial in trials:
            if i < trial.rounds:
                trial.sample()
    for trial in trials:
        found.rows.append(trial.row(shape))
        _measure_roofs(device, found, trial.contender)


class _Trial:
    """Samples of one kernel, with the read floor right before each.

    Results are judged when all of them are there: NumPy's threads go on looking for work after a
    product or norm, and would slow the next sample.
    """

    def __init__(self, contender: Contender, device: Device, rounds: int):
        self.contender, self.device = contender, device
        self._turns = itertools.cycle(range(len(contender.copies)))
        self._samples: list[tuple[float, float]] = []
        self._results: list[list[mx.array]] = []
        self._time(1)  # compiles, allocates, wakes threads
        copies = len(contender.copies)
        most = device.turns * copies
        once = self._time(1)
        self.launches = min(most, max(1, math.ceil(_SAMPLE_SECONDS / once)))
        if device.turns > 1:  # most of that was what an evaluation costs to start
            once = self._time(self.launches)
            self.launches = min(most, max(1, math.ceil(_SAMPLE_SECONDS / once)))
        reads = max(self.launches, math.ceil(_READ_BYTES / contender.nbytes))
        self._reads = min(copies, reads)
        self.rounds = min(rounds, max(_FEWEST_ROUNDS, int(_ROUNDS_SECONDS / once)))

    def sample(self) -> None:
        copies = (self.contender.copies[i] for i in self._take(self._reads))
        floor = self.device.read_seconds([a for copy in copies for a in copy]) / self._reads
        self._samples.append((self._time(self.launches), floor))

    def row(self, shape: tuple[int, int, int]) -> Row:
        N, K, M = shape
        error = max(self._error(results) for results in self._results)
        return Row(
            kernel=self.contender.kernel,
            weights=self.contender.weights,
            N=N,
            K=K,
            M=M,
            dtype=self.contender.dtype,
            nbytes=self.contender.nbytes,
            launches=self.launches,
            seconds=statistics.median(taken for taken, _ in self._samples),
            floor=statistics.median(floor for _, floor in self._samples),
            over_floor=statistics.median(taken / floor for taken, floor in self._samples),
            error=error,
        )

    def _take(self, count: int) -> list[int]:
        return list(itertools.islice(self._turns, count))

    def _time(self, count: int) -> float:
        """Seconds of one launch of several."""
        launch = self.contender.prepare(self._take(count))
        start = time.perf_counter()
        launch.run()
        taken = (time.perf_counter() - start) / count
        self._results.append(launch.results())
        return taken

    def _error(self, results: list[mx.array]) -> float:
        first, *others = results
        if not all(same_bits(first, y) for y in others):
            raise WrongResultError(
                f"[bench] Expected the same result of every launch of {self.contender.kernel}, "
                f"{self.contender.weights}. Received different ones."
            )
        return self.contender.error(first)


def _measure_roofs(device: Device, found: Report, contender: Contender) -> None:
    count = min(len(contender.copies), math.ceil(_ROOF_BYTES / contender.nbytes))
    arrays = [a for copy in contender.copies[:count] for a in copy]
    found.reads.append(sum(a.nbytes for a in arrays) / device.read_seconds(arrays) / 1e9)
    for kind, peak in device.peaks().items():
        found.peaks[kind] = max(peak, found.peaks.get(kind, 0.0))
