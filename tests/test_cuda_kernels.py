"""CUDA kernels that the dispatcher can form, compiled for the machines they run on.

NVRTC needs no GPU. What the kernels compute is checked where there is one: `make test-cuda`.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_gguf import _ext, find_format, formats

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import cuda_driver  # noqa: E402

SOURCE = cuda_driver.flatten(ROOT / "cuda" / "kernels.cu")
PLAIN = ("f32", "f16", "bf16")
TYPES = [f.name for f in formats() if f.supported]


def kernels_of(qtype: str, least: int) -> list[str]:
    """C++ names of a type's kernels for an architecture."""
    return [
        function
        for _, function, architecture in _ext.cuda_kernels()
        if architecture <= least
        and function.split("<")[1].split(",")[0].removeprefix("Tc") == qtype.upper()
    ]


def covering(functions: list[str]) -> list[str]:
    """The kernels of a name that between them have every value of every template argument.

    All of them take minutes a type: MLX_GGUF_ALL_KERNELS=1, as `make test-cuda` has it.
    """
    if os.environ.get("MLX_GGUF_ALL_KERNELS") == "1":
        return functions
    seen: set[tuple[str, int, str]] = set()
    out = []
    for function in functions:
        name, arguments = function.rstrip(">").split("<")
        values = {(name, i, a) for i, a in enumerate(arguments.split(", "))}
        if not values <= seen:
            seen |= values
            out.append(function)
    return out


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    try:
        cuda_driver.library()
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("qtype", TYPES)
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernels_compile(qtype, architecture):
    functions = covering(kernels_of(qtype, architecture))
    assert functions
    parts = max(1, os.cpu_count() or 1)
    with ThreadPoolExecutor(parts) as pool:
        done = pool.map(
            lambda part: cuda_driver.compile(SOURCE, part, f"sm_{architecture}"),
            [functions[i::parts] for i in range(parts) if functions[i::parts]],
        )
        for code, names in done:
            assert code[:4] == b"\x7fELF"
            assert all(name in code for name in names)


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_the_embedded_source_is_the_source(tmp_path):
    out = tmp_path / "source.cpp"
    script = ROOT / "csrc" / "metal" / "embed.cmake"
    options = [f"-DROOT={ROOT / 'cuda' / 'kernels.cu'}", f"-DOUTPUT={out}"]
    command = ["cmake", *options, "-DNAMESPACE=mlx_gguf::cuda", "-P", str(script)]
    subprocess.run(command, check=True)
    text = out.read_text()
    flat = "".join(part.split(')metal"')[0] for part in text.split('R"metal(')[1:])
    assert "namespace mlx_gguf::cuda {" in text
    assert flat.split() == SOURCE.split()


def test_kernel_names_differ():
    names = [name for name, _, _ in _ext.cuda_kernels()]
    functions = [function for _, function, _ in _ext.cuda_kernels()]
    assert len(set(names)) == len(names)
    assert len(set(functions)) == len(functions)


def test_every_type_has_every_path():
    paths = defaultdict(set)
    for _, function, _ in _ext.cuda_kernels():
        name, arguments = function.split("<")
        paths[arguments.split(",")[0].removeprefix("Tc").lower()].add(name)
    for qtype in TYPES:
        block = {"dequantize", "gemv_block", "gemm_block"}
        units = {"prepare", "gemm", "gemv", "gemv_tma"}
        assert paths[qtype] == (block if qtype in PLAIN else block | units), qtype


@pytest.mark.parametrize("qtype", [t for t in TYPES if t not in PLAIN])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_up_to_8_sum_in_one_order(qtype, dtype):
    def order(M: int, N: int, K: int) -> list[str]:
        plan = _ext.cuda_plan_for(qtype, dtype, M, N, K).split()
        return [plan[0]] + [p for p in plan if p.split("=")[0] in ("ranks", "turns", "whole")]

    for N, K in ((1, 256), (33, 768), (4096, 4096), (151936, 4096), (5120, 17408), (64, 65536)):
        solo = order(1, N, K)
        assert solo[0] in ("gemv", "gemv_tma")
        for M in range(2, 9):
            assert order(M, N, K) == solo, (M, N, K)


@pytest.mark.parametrize("qtype", ["q4_k", "q6_k", "q8_0", "iq4_xs", "q4_0"])
def test_a_cluster_shares_out_what_its_blocks_would_alone(qtype):
    shapes = [(40, 256), (4096, 4096), (17408, 5120), (4096, 12288), (151936, 4096), (70000, 512)]
    for N, K in shapes:
        solo = _ext.cuda_launch(qtype, "float16", 1, N, K)
        for M in range(2, 9):
            info = _ext.cuda_launch(qtype, "float16", M, N, K)
            assert (info["ranks"], info["held"]) == (solo["ranks"], solo["held"]), (M, N, K)
            assert info["split"] * solo["cluster"] == solo["split"] * info["cluster"], (M, N, K)
            assert info["rows"] % info["split"] == 0, (M, N, K)


@pytest.mark.parametrize("qtype", [t for t in TYPES if t not in PLAIN])
def test_copies_have_all_of_their_units_and_little_more(qtype):
    """Units start at any multiple of what their bytes share with the 16 of a copy's start."""
    unit = find_format(qtype).block_bytes * 256 // find_format(qtype).block_size
    for N, K in ((520, 4096), (520, 5120), (264, 12288), (64, 17408), (1024, 512), (264, 768)):
        for M in (1, 2, 8):
            info = _ext.cuda_launch(qtype, "float16", M, N, K)
            copy = int(info["plan"].split("copy=")[1].split()[0])
            rows_start = 16 // info["interleave"]
            needed = copy * unit + 16 - math.gcd(copy * unit, rows_start)
            pieces = info["box_bytes"] / 16
            assert pieces % 4 in (1, 2, 3), (M, N, K)  # so that rows are on different banks
            assert needed <= info["box_bytes"] < needed + 32, (M, N, K)
            assert info["ranks"] == 1 or info["held"] % copy == 0, (M, N, K)


def test_many_rows_and_the_other_way_round():
    assert _ext.cuda_plan_for("q4_k", "float16", 9, 64, 256) == "gemm"
    assert _ext.cuda_plan_for("q4_k", "float16", 1, 64, 256, False) == "gemm_block transpose=0"
    assert _ext.cuda_plan_for("bf16", "float16", 9, 64, 256) == "gemm_block"
    assert _ext.cuda_plan_for("bf16", "float16", 1, 64, 256) == "gemv_block"


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match=r"\[cuda_plan_for\] Expected M, N and K of at least 1"):
        _ext.cuda_plan_for("q4_k", "float16", 0, 64, 256)
    with pytest.raises(ValueError, match=r"\[cuda_plan_for\]"):
        _ext.cuda_plan_for("q9_z", "float16", 1, 64, 256)
    with pytest.raises(RuntimeError, match=r"\[load_cuda\] Expected the CUDA backend"):
        _ext.load_cuda("/nowhere/_cuda.so")
