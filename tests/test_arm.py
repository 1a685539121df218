"""The NEON kernels, compiled with zig and run by qemu-user, against float64.

The kernels alone, without MLX: tests/arm/kernels.cpp runs them on cases that are made here.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from blocks import TYPES, dequantize64, random_blocks, saturated_blocks
from oracle import TOLERANCE, relative_error

pytest.importorskip("ziglang", reason="compiles for Arm")
QEMU = shutil.which("qemu-aarch64")
pytestmark = pytest.mark.skipif(QEMU is None, reason="qemu-aarch64 (qemu-user) is not installed")

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-target", "aarch64-linux-musl", "-std=c++20", "-O2", "-g0", "-ffp-contract=fast"]
#: The sources and what they are compiled for beyond the baseline, as CMakeLists.txt has it.
SOURCES = {
    "csrc/cpu/isa_portable.cpp": [],
    "csrc/cpu/isa_neon.cpp": [],
    "csrc/cpu/isa_neon_dotprod.cpp": ["-mcpu=generic+dotprod"],
    "tests/arm/kernels.cpp": [],
}
ISAS = ("neon_dotprod", "neon", "portable")
WITH_FIXED_POINT = ISAS[:2]
BATCHES = {1: "gemv", 2: "gemv", 3: "gemv", 8: "gemv", 9: "gemm", 33: "gemm"}
N = 53  # a tile of gemm, a unit short of one and what no unit holds
QUANTISED = [name for name, size in TYPES.items() if size > 1]
typed = pytest.mark.parametrize("qtype", TYPES)
quantised = pytest.mark.parametrize("qtype", QUANTISED)
on_each = pytest.mark.parametrize("isa", ISAS)
on_fixed = pytest.mark.parametrize("isa", WITH_FIXED_POINT)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    includes = [f"-I{ROOT / 'csrc'}", "-isystem", str(Path(mx.__file__).parent / "include")]
    zig = [sys.executable, "-m", "ziglang"]

    def compile_one(source: str) -> Path:
        target = folder / f"{Path(source).stem}.o"
        command = [*zig, "c++", *FLAGS, *SOURCES[source], *includes]
        subprocess.run([*command, "-c", str(ROOT / source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    target = folder / "kernels"
    command = [*zig, "cc", FLAGS[0], FLAGS[1], *map(str, objects), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


@dataclass
class Results:
    """What a case gave: which rows of x fixed point holds, the weights, products by M."""

    fixed: np.ndarray
    weights: np.ndarray
    product: dict[int, np.ndarray]
    fast: dict[int, np.ndarray]  # gemv or gemm, where all rows are fixed


@pytest.fixture(scope="module")
def run(program):
    def run(isa: str, qtype: str, raw: np.ndarray, x: np.ndarray, tolerance: float) -> Results:
        size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[qtype.upper()]]
        rows, (M, K) = len(raw), x.shape
        ggml_id = GGMLQuantizationType[qtype.upper()].value
        header = struct.pack("<6if", ggml_id, size, nbytes, rows, K, M, tolerance)
        data = header + raw.tobytes() + x.astype("<f4").tobytes()
        done = subprocess.run(
            [str(QEMU), str(program), isa], input=data, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        at = 0

        def take(dtype: str, *shape: int) -> np.ndarray:
            nonlocal at
            start, at = at, at + 4 * int(np.prod(shape))
            return np.frombuffer(done.stdout[start:at], dtype).reshape(shape)

        out = Results(take("<i4", M) != 0, take("<f4", rows, K), {}, {})
        for batch in BATCHES:
            out.product[batch] = take("<f4", batch, rows)
            if out.fixed.all():
                out.fast[batch] = take("<f4", batch, rows)
        assert at == len(done.stdout)
        return out

    return run


def widths(qtype: str) -> list[int]:
    size = TYPES[qtype]
    return [K for K in (size, 3 * size, 640, 1024) if K % size == 0]


def test_the_best_instruction_set_that_the_processor_has_comes_first(program):
    def isas(cpu: str) -> list[str]:
        command = [str(QEMU), "-cpu", cpu, str(program)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert isas("max") == ["neon_dotprod", "neon", "portable"]
    assert isas("cortex-a53") == ["neon", "portable"]


@typed
@on_each
def test_decoded_weights_are_exact(isa, qtype, run):
    rng = np.random.default_rng(0)
    for K in widths(qtype):
        raw = random_blocks(qtype, N, K, rng, extreme=True)
        weights = run(isa, qtype, raw, np.zeros((33, K)), 0).weights
        assert np.array_equal(weights, dequantize64(raw, qtype)), f"K={K}"


def check_products(run, isa: str, qtype: str, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(1)
    has_gemv = isa in WITH_FIXED_POINT and qtype in QUANTISED
    for K in widths(qtype):
        raw = random_blocks(qtype, N, K, rng)
        x = rng.standard_normal((33, K))
        if K == 1024:  # outliers must not drown the others
            x[:, rng.choice(K, 8, replace=False)] *= 60
        x = x.astype(np.float16 if dtype == mx.float16 else np.float32).astype(np.float64)
        W = dequantize64(raw, qtype)
        expected, terms = x @ W.T, np.abs(x) @ np.abs(W).T
        # What csrc/cpu/activations.cpp lets fixed point lose of a row.
        got = run(isa, qtype, raw, x, 0 if dtype == mx.float32 else 2.1e-5)
        assert got.fixed.all() == has_gemv
        assert list(got.fast) == (list(BATCHES) if has_gemv else [])
        for kernels, bound in ((got.product, 2e-6), (got.fast, TOLERANCE[dtype])):
            for M, y in kernels.items():
                where = f"K={K} M={M} {'product' if kernels is got.product else BATCHES[M]}"
                assert np.isfinite(y).all(), where
                assert (np.abs(y - expected[:M]) <= bound * terms[:M]).all(), where
                if K >= 512:  # sums of fewer may cancel in all rows of w at a time
                    error = relative_error(y, expected[:M])
                    assert error <= bound, f"{where}: {error}"
                # A row's result does not depend on the batch.
                same = 1 if kernels is got.product or M <= 8 else 9
                assert np.array_equal(y[:same], kernels[same][:M]), where


@typed
@on_each
def test_products(isa, qtype, run):
    check_products(run, isa, qtype, mx.float32)


@quantised
@on_fixed
def test_products_with_16_bit_floats(isa, qtype, run):
    check_products(run, isa, qtype, mx.float16)


@quantised
@on_fixed
def test_the_largest_sums_do_not_overflow(isa, qtype, run):
    raw = saturated_blocks(qtype, 1024)
    W = dequantize64(raw, qtype)
    # Halves of a word's range, and both words that may be the largest.
    most = np.resize([2 - 2.0**-23, 32767 / 2**14, 32639 / 2**14], (33, 1))
    signs = np.concatenate([np.ones((2, 1024)), np.sign(W + 1e-9)])
    x = np.resize(signs, (33, 1024)) * most
    expected, terms = x @ W.T, np.abs(x) @ np.abs(W).T
    for tolerance in (0, 2.1e-5):
        for M, y in run(isa, qtype, raw, x, tolerance).fast.items():
            # Finer than any lost carry, coarser than 16 bits.
            assert (np.abs(y - expected[:M]) <= 3e-5 * terms[:M]).all(), f"M={M}"


@on_fixed
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1.1e37, 1e-21])
def test_rows_that_fixed_point_does_not_hold_are_refused(isa, bad, run):
    K = 640
    raw = random_blocks("q8_0", 1, K, np.random.default_rng(2))
    x = np.zeros((33, K))
    x[:16, :] = 1
    wrong = {0: 0, 5: 255, 12: 256, 20: 400, 32: 639}
    for row, k in wrong.items():
        if abs(bad) < 1:
            x[row] = 0
        x[row, k] = bad
    got = run(isa, "q8_0", raw, x, 0)
    assert {int(row) for row in np.flatnonzero(~got.fixed)} == set(wrong)
