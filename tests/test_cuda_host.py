"""The CUDA backend's host side: its rules anywhere, what comes of them where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import dequantize64, random_blocks
from mlx_gguf import _abi, _ext, doctor
from mlx_gguf.cli import main
from oracle import DTYPES, activations, bits, float64, relative_error

on_gpu = pytest.mark.skipif("cuda" not in _ext.backends(), reason="needs CUDA")
#: Half a unit in the last place: what rounding a weight to x's dtype may change.
UNIT = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
LARGE = 1024, 1024  # as few weights as are written out


def plan(M: int, N: int, K: int, *, qtype: str = "q4_k", dtype: str = "bfloat16", t: bool = True):
    return _ext.cuda_plan_for(qtype, dtype, M, N, K, t)


def test_weights_are_written_out_for_many_rows_of_large_matrices_alone():
    assert plan(256, *LARGE) == "dense"
    assert plan(255, *LARGE) == "gemm"
    assert plan(256, 1023, 1024) == "gemm"
    assert plan(256, *LARGE, t=False) == "dense transpose=0"
    assert plan(2048, 1 << 15, 1 << 12) == "dense"
    assert plan(2048, 1 + (1 << 15), 1 << 12) == "gemm"
    assert plan(2048, *LARGE, dtype="float32") == "gemm"
    for qtype in ("f16", "bf16", "f32"):
        assert plan(2048, *LARGE, qtype=qtype) == "gemm_block"
    for qtype in ("q8_0", "iq4_xs", "mxfp4"):
        assert plan(2048, *LARGE, qtype=qtype) == "dense"


def test_what_there_is_to_say_of_cuda_is_said():
    here = "cuda" in _ext.backends()
    assert here == _ext.has_cuda() == bool(_ext.cuda_info())
    versions = doctor.versions()
    for name in ("cuda device", "cuda driver", "NVRTC", "CUDA cache"):
        assert (name in versions) == here, name
    if here:
        assert _abi.CUDA_PROBLEM is None
        assert versions["cuda device"].startswith("compute capability ")
        assert "(CUDA 1" in versions["cuda driver"]
        assert "libnvrtc" in versions["NVRTC"]
    else:
        assert _abi.CUDA_PROBLEM


def test_doctor_says_why_there_is_no_cuda(monkeypatch, capsys):
    monkeypatch.setattr(_ext, "backends", lambda: ["cpu"])
    monkeypatch.setattr(doctor, "CUDA_PROBLEM", "[load_cuda] Expected what is not there.")
    assert main(["doctor", "--types", "q4_0", "--backend", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "not checked: cuda: [load_cuda] Expected what is not there.\n" in out


def test_a_backend_that_does_not_load_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_abi, "__file__", str(tmp_path / "_abi.py"))
    assert _abi.load_cuda() == "this build of mlx-gguf has no CUDA kernels"
    if "cuda" not in _ext.backends():
        (tmp_path / "_cuda.so").write_bytes(b"no library")
        with pytest.warns(RuntimeWarning, match=r"\[load_cuda\] Expected the CUDA backend"):
            problem = _abi.load_cuda()
        assert "file too short" in problem or "invalid ELF" in problem


def test_tune_says_that_cuda_has_nothing_to_tune(monkeypatch, capsys):
    args = ["tune", "--shapes", "q4_k:4096x4096"]
    assert main([*args, "--backend", "cuda"]) == 2
    assert "plan follows from its shape and the device" in capsys.readouterr().err
    monkeypatch.setattr("mlx_gguf.roofline.default_backend", lambda: "cuda")
    assert main(args) == 2
    assert "Received 'cuda'" in capsys.readouterr().err


# With a GPU


def rounded_bound(X: np.ndarray, W: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """What rounding every weight, and the sum, may change at most."""
    return UNIT[dtype] * (1.1 * np.abs(X) @ np.abs(W) + np.abs(X @ W)) + 2.0**-24


@on_gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("qtype", ["q4_k", "q6_k", "q8_0", "iq4_xs", "mxfp4", "q5_1"])
def test_products_of_written_out_weights_equal_float64(qtype, dtype):
    rng, dtype = np.random.default_rng(0), DTYPES[dtype]
    N, K = 1031, 1280
    packed = random_blocks(qtype, N, K, rng)
    w, W = mx.array(packed), dequantize64(packed, qtype).T
    for shape, transpose in (((256, K), True), ((3, 87, K), True), ((300, N), False)):
        x, X = activations(shape, dtype, rng)
        V = W if transpose else W.T
        X = X.reshape(-1, X.shape[-1])
        y = gg.quantized_matmul(x, w, qtype, transpose)
        assert y.shape == (*shape[:-1], V.shape[1])
        error = np.abs(float64(y).reshape(-1, V.shape[1]) - X @ V)
        assert (error <= rounded_bound(X, V, dtype)).all(), f"{shape} {transpose}"
        # The sum of many roundings is far below the bound of each.
        assert relative_error(float64(y).reshape(error.shape), X @ V) < 1.2 * UNIT[dtype]


@on_gpu
@pytest.mark.parametrize("shape", [(), (1024,), (256, 1), (256, 1024), (1, 1024)])
def test_an_addend_of_any_shape(shape):
    rng = np.random.default_rng(1)
    packed = random_blocks("q4_k", 1024, 1024, rng)
    W = dequantize64(packed, "q4_k").T
    x, X = activations((256, 1024), mx.float16, rng)
    c, C = activations(shape, mx.float16, rng)
    for alpha, beta in ((1.0, 1.0), (0.5, 2.0)):
        y = float64(gg.quantized_addmm(c, x, mx.array(packed), "q4_k", alpha, beta))
        ref = alpha * X @ W + beta * C
        assert (np.abs(y - ref) <= rounded_bound(X, W, mx.float16) + 2e-3).all()


@on_gpu
def test_weights_written_out_do_not_overtake_each_other():
    """Independent products, which share the memory for weights, in one graph."""
    rng = np.random.default_rng(2)
    x, _ = activations((512, 1024), mx.bfloat16, rng)
    ws = [mx.array(random_blocks("q4_k", 1024 + 64 * i, 1024, rng)) for i in range(24)]
    mx.eval(x, ws)
    apart = []
    for w in ws:
        apart.append(gg.quantized_matmul(x, w, "q4_k"))
        mx.eval(apart[-1])
    for _ in range(5):
        together = [gg.quantized_matmul(x, w, "q4_k") for w in reversed(ws)]
        mx.eval(together)
        for a, b in zip(apart, reversed(together), strict=True):
            assert np.array_equal(bits(a), bits(b))


@on_gpu
def test_memory_of_written_out_weights_is_bounded():
    rng = np.random.default_rng(3)
    x, _ = activations((256, 1024), mx.bfloat16, rng)
    w = mx.array(random_blocks("q4_k", 8192, 1024, rng))
    mx.eval(x, gg.quantized_matmul(x, w, "q4_k"))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = x
    for _ in range(64):
        y = gg.quantized_matmul(x + y[:1, :1], w, "q4_k")
    mx.eval(y)
    written_out = 2 * 8192 * 1024
    assert mx.get_peak_memory() - before < 64 * written_out / 2


EXACT = """
import mlx.core as mx, numpy as np, mlx_gguf as gg
from blocks import random_blocks
rng = np.random.default_rng(4)
w = mx.array(random_blocks("q4_k", 1024, 1024, rng))
x = mx.array(rng.uniform(-1, 1, (256, 1024)).astype(np.float32)).astype(mx.float16)
whole = gg.quantized_matmul(x, w, "q4_k")
parts = mx.concatenate([gg.quantized_matmul(x[i : i + 64], w, "q4_k") for i in range(0, 256, 64)])
print(mx.array_equal(whole, parts).item())
"""


@on_gpu
@pytest.mark.parametrize(("value", "exact"), [("0", "True"), ("1", "False")])
def test_the_environment_keeps_products_exact(value, exact):
    env = os.environ | {"MLX_GGUF_CUDA_DENSE": value, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", EXACT], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [exact]


@on_gpu
def test_operands_in_any_layout():
    """No node puts them in row order: the evaluation does."""
    rng = np.random.default_rng(5)
    packed = random_blocks("q4_k", 64, 512, rng)
    w = mx.array(packed)
    x, _ = activations((512, 6), mx.float16, rng)
    wide, _ = activations((6, 1024), mx.float16, rng)
    c, _ = activations((64, 6), mx.float16, rng)
    for view in (x.T, wide[:, ::2], wide[:, 512:], mx.broadcast_to(wide[:1, :512], (6, 512))):
        for M in (1, 6):
            v = view[:M]
            plain = mx.array(np.array(v))
            y = gg.quantized_matmul(v, w, "q4_k")
            assert np.array_equal(bits(y), bits(gg.quantized_matmul(plain, w, "q4_k")))
            added = gg.quantized_addmm(c.T[:M], v, w, "q4_k")
            same = gg.quantized_addmm(mx.array(np.array(c.T[:M])), plain, w, "q4_k")
            assert np.array_equal(bits(added), bits(same))
