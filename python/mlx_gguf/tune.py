"""Which plan is fastest on this machine, by measuring: see :func:`tune`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import _ext
from .file import GGUFFile
from .inspect import is_supported
from .reference import RandomWeights, activations, judge, same_bits, tolerance
from .roofline import find_device

__all__ = ["Choice", "Matrix", "matrices_named", "matrices_of", "tune"]

ROWS = (1, 2, 4, 8)  # of x: those a gemv serves
# A plan must be this much faster to take the place of the one in use.
_MARGIN = 0.02


@dataclass(frozen=True)
class Matrix:
    """A weight matrix, by what its products' plans depend on.

    Attributes
    ----------
    qtype : str
    N, K : int
        Its rows, and the weights in one.
    """

    qtype: str
    N: int
    K: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes in a file."""
        format = _ext.find_format(self.qtype)
        assert format is not None
        return self.N * format.row_bytes(self.K)


@dataclass(frozen=True)
class Choice:
    """What measuring found for one matrix and number of rows of x.

    Attributes
    ----------
    matrix : Matrix
    M : int
        Rows of x.
    now : str
        The plan that was in use.
    best : str
        The fastest right plan; ``now`` unless it is clearly faster.
    seconds : float
        Of one product by the best plan, with weights from memory; the median.
    floor : float
        Seconds in which the device reads the same weights and does nothing else, measured
        in the same run; the median.
    rejected : dict of str to str
        Plans that failed or gave a wrong result, and how.
    """

    matrix: Matrix
    M: int
    now: str
    best: str
    seconds: float
    floor: float
    rejected: dict[str, str]


def matrices_of(file: GGUFFile) -> list[Matrix]:
    """The distinct packed matrices of a model that the operations take, the largest first."""
    found = {
        Matrix(info.qtype, info.shape[-2], info.shape[-1])
        for info in file.tensors.values()
        if len(info.shape) > 1
        and info.nbytes
        and is_supported(info.qtype)
        and _format(info.qtype).packed
    }
    return sorted(found, key=lambda m: (-m.nbytes, m.qtype))


def matrices_named(texts: Sequence[str]) -> list[Matrix]:
    """Matrices from texts such as ``"q4_k:4096x12288"``: type, N and K.

    Raises
    ------
    ValueError
        Another text, a type without kernels, or a K that is not whole blocks.
    """
    out = []
    for text in texts:
        qtype, _, dims = text.lower().partition(":")
        N, _, K = dims.partition("x")
        fits = is_supported(qtype) and N.isdecimal() and K.isdecimal() and int(N) and int(K)
        if not fits or int(K) % _format(qtype).block_size:
            raise ValueError(
                "[tune] Expected TYPE:NxK with a type that has kernels and K in whole blocks, "
                f"such as q4_k:4096x4096. Received {text!r}."
            )
        out.append(Matrix(qtype, int(N), int(K)))
    return list(dict.fromkeys(out))


def _format(qtype: str) -> _ext.Format:
    format = _ext.find_format(qtype)
    assert format is not None
    return format


def cold_bytes(backend: str) -> int:
    """Bytes of weights to go through so that none of them comes from a cache.

    Five times the last-level cache; no less than 256 MiB, and 512 MiB on GPUs, where the
    size of that cache is not known.
    """
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [path.read_text().strip() for path in caches] if backend == "cpu" else []
    known = max((int(s[:-1]) << 10 for s in sizes if s.endswith("K")), default=0)
    return max(5 * known, (256 if backend == "cpu" else 512) << 20)


def tune(
    matrices: Sequence[Matrix],
    *,
    backend: str,
    dtype: str,
    repetitions: int = 7,
    time_limit: float = math.inf,
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[list[Choice]]:
    """Measure the plans of products with some matrices and keep the fastest in use.

    Every plan multiplies random weights with 1, 2, 4 and 8 rows of activations. Only plans
    whose results are right may win, and for more than one row only those that sum in the order
    of the winner for one, so that a row never depends on its batch. The winners are in use
    afterwards, in this process; :func:`mlx_gguf.plans.store` keeps them.

    Parameters
    ----------
    matrices : sequence of Matrix
    backend : str
        ``"cpu"`` or ``"metal"``. CUDA's plans follow from shape and device and are no choice.
    dtype : str
        Of activations: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    repetitions : int, optional
        Times that every plan is measured, in turns. Default: 7.
    time_limit : float, optional
        Seconds after which no further matrix is begun.
    report : callable, optional
        Is told what is being done.

    Yields
    ------
    list of Choice
        One for each number of rows, for each matrix that the time sufficed for.

    Raises
    ------
    ValueError
        A backend that is not here, or has nothing to choose from.
    """
    if backend == "cuda":
        raise ValueError(
            "[tune] Expected a backend with plans to choose from, cpu or metal. Received 'cuda', "
            "where a product's plan follows from its shape and the device; --backend cpu tunes "
            "the CPU's."
        )
    if backend not in _ext.backends():
        raise ValueError(
            f"[tune] Expected a backend of this machine, {' or '.join(_ext.backends())}. "
            f"Received {backend!r}."
        )
    end = time.monotonic() + time_limit
    for i, matrix in enumerate(matrices):
        if time.monotonic() >= end:
            return
        name = f"{matrix.qtype} {matrix.N} x {matrix.K}, {i + 1} of {len(matrices)}"

        def report_on_it(text: str, name: str = name) -> None:
            report(f"{name}: {text}")

        report_on_it("making weights")
        yield _Bench(matrix, backend, dtype, repetitions).run(report_on_it)


class _Bench:
    """One matrix, copied until no cache holds all copies."""

    def __init__(self, matrix: Matrix, backend: str, dtype: str, repetitions: int):
        self.matrix, self.backend, self.dtype = matrix, backend, dtype
        self.repetitions = repetitions
        self.stream = mx.cpu if backend == "cpu" else mx.gpu
        self.rng = np.random.default_rng(0)
        self.weights = RandomWeights(matrix.qtype, (matrix.N, matrix.K), self.rng)
        copies = math.ceil(cold_bytes(backend) / matrix.nbytes)
        self.copies = [mx.array(self.weights.packed) for _ in range(copies)]
        mx.eval(self.copies)
        self.tolerance = tolerance(matrix.qtype, dtype, backend)
        all_plans = _ext.plan_candidates(backend, matrix.qtype)
        self.plans = [plan for plan in all_plans if plan.kernel == "gemv"]
        self.before = {M: self._plan_now(M) for M in ROWS}

    def run(self, report: Callable[[str], None]) -> list[Choice]:
        report("read floor")
        floor = statistics.median(self._floor() for _ in range(self.repetitions))
        winners: dict[int, str] = {}
        choices = []
        solo = self.plans
        try:
            for M in ROWS:
                plans = [p for p in solo if p.columns <= M]
                report(f"{len(plans)} plans for {M} row{'s' * (M > 1)}")
                choice = self._race(M, plans, winners, floor)
                winners[M] = choice.best
                choices.append(choice)
                if M == 1:
                    best = next(p for p in self.plans if str(p) == choice.best)
                    solo = [p for p in self.plans if p.same_order(best)]
        except BaseException:
            self._use({M: str(plan) for M, plan in self.before.items()})
            raise
        self._use(winners)
        return choices

    def _race(
        self, M: int, plans: list[_ext.Plan], winners: dict[int, str], floor: float
    ) -> Choice:
        x, x64 = activations((M, self.matrix.K), self.dtype, self.rng, normal=True)
        ref, terms = self.weights.product(x64)
        rows = None
        if M > 1:
            self._use(dict.fromkeys(ROWS, winners[1]))
            solo = [self._products(x[m : m + 1], self.copies[:1])[0] for m in range(M)]
            rows = mx.concatenate(solo, stream=self.stream)
            mx.eval(rows)
        rejected: dict[str, str] = {}
        for plan in map(str, plans):
            self._use(dict.fromkeys(ROWS, winners.get(1, plan)) | {M: plan})
            if problem := self._problem(x, ref, terms, rows):
                rejected[plan] = problem
        times: dict[str, list[float]] = {str(p): [] for p in plans if str(p) not in rejected}
        if not times:
            raise ValueError(
                f"[tune] Expected a plan with right results for {self.matrix} and {M} rows of "
                f"{self.dtype}. Received {rejected}; run: mlx-gguf doctor."
            )
        # In turns, so that all of them see the machine's better and worse moments.
        for _ in range(self.repetitions):
            for plan, taken in times.items():
                self._use(dict.fromkeys(ROWS, winners.get(1, plan)) | {M: plan})
                outputs = self._products(x, self.copies)
                start = time.perf_counter()
                mx.eval(outputs)
                taken.append((time.perf_counter() - start) / len(self.copies))
        medians = {plan: statistics.median(taken) for plan, taken in times.items()}
        now, best = str(self.before[M]), min(medians, key=medians.__getitem__)
        if now in medians and medians[best] > (1 - _MARGIN) * medians[now]:
            best = now
        return Choice(self.matrix, M, now, best, medians[best], floor, rejected)

    def _problem(
        self, x: mx.array, ref: np.ndarray, terms: np.ndarray, rows: mx.array | None
    ) -> str | None:
        """What is wrong with the plan in use; this warms everything up, too."""
        try:
            outputs = self._products(x, self.copies)
            mx.eval(outputs)
        except RuntimeError as error:
            return str(error)
        if problem := judge(outputs[0], ref, terms, self.tolerance).problem:
            return problem
        if not all(same_bits(outputs[0], y) for y in outputs[1:]):
            return "results differ from one launch to the next"
        if rows is not None and not same_bits(outputs[0], rows):
            return "rows differ from their solo runs"
        return None

    def _products(self, x: mx.array, copies: Sequence[mx.array]) -> list[mx.array]:
        qtype = self.matrix.qtype
        return [_ext.quantized_matmul(x, w, qtype, stream=self.stream) for w in copies]

    def _floor(self) -> float:
        """Seconds to read one copy, in a pass over all of them."""
        return find_device(self.backend).read_seconds(self.copies) / len(self.copies)

    def _plan_now(self, M: int) -> _ext.Plan:
        m = self.matrix
        return _ext.plan_for(self.backend, m.qtype, self.dtype, M, m.N, m.K)

    def _use(self, plans: dict[int, str]) -> None:
        m = self.matrix
        _ext.set_plans(self.backend, m.qtype, self.dtype, m.N, m.K, plans)


def entry(choices: Sequence[Choice], dtype: str) -> dict[str, Any]:
    """What :func:`mlx_gguf.plans.store` keeps of one matrix."""
    matrix = choices[0].matrix
    return {
        "qtype": matrix.qtype,
        "dtype": dtype,
        "N": matrix.N,
        "K": matrix.K,
        "plans": {choice.M: choice.best for choice in choices},
    }
