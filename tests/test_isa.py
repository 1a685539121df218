"""Instruction sets and numbers of threads change the speed alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from blocks import TYPES
from mlx_gguf import _ext
from subprocesses import failing, run

# Everything the CPU backend computes, for every type, saved to a file.
COMPUTE = """
import sys
import mlx.core as mx, numpy as np
from blocks import TYPES, random_blocks
from oracle import DTYPES, activations
import mlx_gguf as gg
from mlx_gguf import _ext
out = {"isa": np.array(_ext.cpu_isa()), "threads": np.array(_ext.cpu_threads())}
for qtype, size in TYPES.items():
    rng = np.random.default_rng(0)
    K = 3 * max(size, 32)
    w = mx.array(random_blocks(qtype, 3 * 33, K, rng, extreme=False)).reshape(3, 33, -1)
    e = mx.array(random_blocks(qtype, 33, K, rng, extreme=True))
    for name, dtype in DTYPES.items():
        x, _ = activations((70, K), dtype, rng)
        z, _ = activations((9, 33), dtype, rng)
        idx = mx.array(rng.integers(0, 3, 7))
        results = {
            "dequantize": gg.dequantize(e, qtype, dtype),
            "matmul": gg.quantized_matmul(x, w[0], qtype),
            "solo": gg.quantized_matmul(x[:1], w[0], qtype),
            "back": gg.quantized_matmul(z, w[0], qtype, False),
            "addmm": gg.quantized_addmm(z, x[:9], w[0], qtype, 0.5, 2.0),
            "gather": gg.gather_qmm(x[:14].reshape(7, 2, K), w, qtype, mx.arange(7), idx),
        }
        for op, y in results.items():
            out[f"{qtype} {name} {op}"] = np.array(y.astype(mx.float32))
np.savez(sys.argv[1], **out)
"""


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    @cache
    def compute(**env):
        path = tmp_path_factory.mktemp("isa") / "out.npz"
        run(COMPUTE, str(path), **env)
        return dict(np.load(path))

    return lambda **env: compute(**env)


@pytest.mark.parametrize("isa", _ext.cpu_isas())
def test_each_instruction_set_gives_the_same_results(isa, computed):
    best, other = computed(), computed(MLX_GGUF_ISA=isa)
    assert (str(other.pop("isa")), str(best["isa"])) == (isa, _ext.cpu_isa())
    # Where they round differently: half a unit of the output's last place and the sums' error.
    units = {"f32": 4e-6, "f16": 2.0**-10, "bf16": 2.0**-7}
    compared = 0
    for key, y in other.items():
        if key == "threads":
            continue
        _, dtype, op = key.split()
        if op == "dequantize":
            assert np.array_equal(y, best[key]), key
        else:
            error = np.linalg.norm((y - best[key]).astype(np.float64))
            assert error <= units[dtype] * np.linalg.norm(best[key].astype(np.float64)), key
        compared += 1
    assert compared == len(TYPES) * 3 * 6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads, computed):
    default, other = computed(), computed(MLX_GGUF_NUM_THREADS=str(threads))
    assert int(other["threads"]) == threads
    assert default.keys() == other.keys()
    for key, y in other.items():
        if key != "threads":
            assert y.tobytes() == default[key].tobytes(), key


@pytest.mark.parametrize("isa", ["sse9", "", "AVX2"])
def test_an_unknown_instruction_set_is_an_error(isa):
    done = failing("from mlx_gguf import _ext; _ext.cpu_isa()", MLX_GGUF_ISA=isa)
    assert done.returncode != 0
    expected = f"[MLX_GGUF_ISA] Expected an instruction set of this machine. Received '{isa}'."
    assert expected in done.stderr


@pytest.mark.parametrize("text", ["0", "-1", "many", "1025", "2x", ""])
def test_a_number_of_threads_that_makes_no_sense_is_ignored(text):
    code = "from mlx_gguf import _ext; print(_ext.cpu_threads())"
    assert run(code, MLX_GGUF_NUM_THREADS=text) == run(code)
