"""The host side of the Metal backend on a stand-in for Metal: launches are executed by meaning.

What the kernels compute is checked in test_metal_kernels.py; here it is which kernel is
launched with which buffers, steps, indices and grid, and the path through MLX's own matmul.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

ROOT = Path(__file__).resolve().parent.parent
METAL = ROOT / "csrc/metal"
MLX = Path(mx.__file__).parent


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    assert compiler, "no C++ compiler"
    folder = tmp_path_factory.mktemp("metal_host")
    # MLX's nodes are evaluated on the CPU there, as their stream is.
    nodes = folder / "nodes.cpp"
    text = (ROOT / "csrc/gpu/nodes.cpp").read_text()
    assert text.count("eval_gpu(") == 1
    nodes.write_text(text.replace("eval_gpu(", "eval_cpu("))
    sources = [
        *(ROOT / "tests/metal_host" / name for name in ("host.cpp", "device.cpp")),
        *(METAL / name for name in ("eval.cpp", "plan.cpp", "names.cpp")),
        *(ROOT / "csrc" / name for name in ("formats.cpp", "tuned.cpp", "gpu/batch.cpp")),
        nodes,
    ]

    def compile_one(item: tuple[int, Path]) -> Path:
        number, source = item
        target = folder / f"{number}.o"
        includes = [f"-I{ROOT / 'tests/metal_host'}", f"-I{ROOT / 'csrc'}", f"-I{MLX / 'include'}"]
        command = [compiler, "-std=c++20", "-O1", *includes, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, enumerate(sources)))
    program = folder / "host"
    libraries = [f"-L{MLX / 'lib'}", "-lmlx", f"-Wl,-rpath,{MLX / 'lib'}"]
    subprocess.run([compiler, *map(str, objects), *libraries, "-o", str(program)], check=True)
    return program


def test_every_launch_gives_the_product_it_stands_for(host):
    done = subprocess.run([host], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    cases, failed = done.stdout.splitlines()[-1].removesuffix(" failed").split(" cases, ")
    assert int(cases) > 1000
    assert int(failed) == 0
