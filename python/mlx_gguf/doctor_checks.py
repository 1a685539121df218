"""What ``mlx-gguf doctor`` asks of every kernel: operands, results and the right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import _ext
from .reference import DTYPES, RandomWeights, activations

# Odd numbers of rows and of blocks; several steps of every kernel along K and a tail.
_EXPERTS, _N, _BLOCKS = 3, 35, {256: 5, 32: 41, 1: 1283}
_ROWS = 33  # of x in a gemm: a tile and a row
_MANY = 513  # for which csrc/metal/plan.cpp takes MLX's matmul
# Rows of x, N and K for which csrc/cuda/choose.cpp writes weights out in x's dtype.
_DENSE = 256, 1031, 1280


@dataclass(frozen=True)
class Check:
    """A result, the right one, and what the sum of the terms' magnitudes was."""

    path: str
    result: Callable[[], mx.array]
    ref: np.ndarray
    terms: np.ndarray
    solo: Callable[[], mx.array] | None = None  # must have the same bits
    tolerance: float | None = None  # if it is not the type's


class Samples:
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

    def product(self, name: str, M: int, *, transpose: bool = True, solo: bool = False) -> Check:
        x, x64 = (self.x, self.x64) if transpose else (self.z, self.z64)
        w = self.w64[0].T if transpose else self.w64[0]
        return Check(
            f"{name} M={M}" + ("" if transpose else " x @ W"),
            lambda: self.matmul(x[:M], transpose),
            x64[:M] @ w,
            abs(x64[:M]) @ abs(w),
            (lambda: self.solo(M)) if solo else None,
        )

    def addmm(self, M: int) -> Check:
        x, c, w = self.x64[:M], self.c64[:M], self.w64[0].T
        return Check(
            f"addmm M={M}",
            lambda: _ext.quantized_addmm(
                self.c[:M], self.x[:M], self.w[0], self.qtype, 0.5, 2.0, stream=self.stream
            ),
            0.5 * (x @ w) + 2.0 * c,
            0.5 * (abs(x) @ abs(w)) + 2.0 * abs(c),
        )

    def gathered(self, name: str, *, ascending: bool, transpose: bool = True) -> Check:
        experts = np.sort(self.experts) if ascending else self.experts
        x, x64 = (self.x, self.x64) if transpose else (self.z, self.z64)
        x, x64 = x[:_ROWS], x64[:_ROWS]
        w = self.w64[experts]
        rule = "mk,mnk->mn" if transpose else "mn,mnk->mk"
        return Check(
            name + ("" if transpose else " x @ W"),
            lambda: self.gather(experts, x, transpose=transpose, sorted_indices=ascending),
            np.einsum(rule, x64, w)[:, None],
            np.einsum(rule, abs(x64), abs(w))[:, None],
        )

    def numbers(self, name: str, places: np.ndarray) -> Check:
        def result() -> mx.array:
            w = mx.take(self.w[0], mx.array(places), 0, stream=self.stream)
            dtype = getattr(mx, self.dtype)
            return _ext.dequantize(w, self.qtype, dtype, stream=self.stream)

        values = self.w64[0][places]
        return Check(name, result, values, abs(values))


def checks(backend: str, qtype: str, dtype: str) -> Iterator[Check]:
    """First the kernels that are chosen by themselves, then each plan by force.

    A check must be done with when the next one is asked for: plans are stored in between.
    """
    s = Samples(backend, qtype, dtype)
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


def _rounded(s: Samples) -> Iterator[Check]:
    """A product of so many rows that its weights are rounded to x's dtype first."""
    format = _ext.find_format(s.qtype)
    assert format is not None
    if not format.packed or s.dtype == "float32":
        return
    rng, (M, N, K) = np.random.default_rng(1), _DENSE
    weights = RandomWeights(s.qtype, (N, K), rng)
    x, x64 = activations((M, K), s.dtype, rng)
    w = mx.array(weights.packed)
    yield Check(
        f"dense M={M}",
        lambda: _ext.quantized_matmul(x, w, s.qtype, stream=s.stream),
        *weights.product(x64),
        tolerance=format.tolerance + DTYPES[s.dtype][0],
    )


def cuda_products(qtype: str, dtype: str) -> Iterator[tuple[str, str, int, int, int, int, bool]]:
    """What the checks of a type and dtype compute on CUDA, as ``cuda_compile`` wants it."""
    format = _ext.find_format(qtype)
    assert format is not None
    K = _BLOCKS[format.block_size] * format.block_size
    for M in (0, 1, 2, 8, _ROWS):
        yield qtype, dtype, M, _N, K, 0, True
    yield qtype, dtype, _ROWS, _N, K, 0, False
    for transpose in (True, False):
        yield qtype, dtype, _ROWS, _N, K, _EXPERTS, transpose


def _kernel(plan: _ext.Plan, qtype: str, dtype: str) -> str:
    name = _ext.metal_kernel_name(plan, qtype, dtype)
    return f"{name} ({plan})" if plan.kernel == "gemv" else name
