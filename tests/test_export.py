"""Functions that use our operations, exported by MLX and run without this package."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import TYPES, random_blocks
from oracle import DTYPES, activations
from subprocesses import run

IMPORT = """
import sys
import mlx.core as mx
fun = mx.import_function(sys.argv[1])
inputs = mx.load(sys.argv[2])
out = fun(*(inputs[str(i)] for i in range(len(inputs))))
assert "mlx_gguf" not in sys.modules
mx.savez(sys.argv[3], *(y.astype(mx.float32) for y in out))
"""


def close(a, b, tolerance=2e-6):
    a, b = (np.array(v.astype(mx.float32)).astype(np.float64) for v in (a, b))
    return a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def imported_elsewhere(path, inputs, tmp_path):
    mx.savez(str(tmp_path / "in.npz"), **{str(i): a for i, a in enumerate(inputs)})
    run(IMPORT, path, str(tmp_path / "in.npz"), str(tmp_path / "out.npz"))
    out = mx.load(str(tmp_path / "out.npz"))
    return [out[f"arr_{i}"] for i in range(len(out))]


def test_every_operation_and_type_in_a_process_without_this_package(tmp_path):
    rng = np.random.default_rng(0)
    x, _ = activations((2, 3, 256), mx.float32, rng)
    rhs = mx.array([1, 0, 1])
    weights = {t: mx.array(random_blocks(t, 6, 256, rng, extreme=False)) for t in TYPES}

    def fun(x, rhs):
        out = []
        for t, w in weights.items():
            out += [
                gg.quantized_matmul(x, w, t),
                gg.quantized_addmm(x[..., :6], x, w, t, 0.5, 2.0),
                gg.quantized_matmul(x[..., :6], w, t, transpose=False),
                gg.gather_qmm(x[0], w.reshape(2, 3, -1), t, mx.zeros_like(rhs), rhs),
                gg.dequantize(w, t),
            ]
        return out

    path = str(tmp_path / "f.mlxfn")
    assert mx.export_function is gg.export_function
    mx.export_function(path, fun, x, rhs)
    got = imported_elsewhere(path, [x, rhs], tmp_path)
    expected = fun(x, rhs)
    names = [f"{t} {i}" for t in TYPES for i in range(5)]
    for name, a, b in zip(names, got, expected, strict=True):
        assert close(a, b), name
        if name.endswith("4"):
            assert mx.array_equal(a, b), name


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_dtype_is_kept(dtype, tmp_path):
    rng = np.random.default_rng(0)
    x, _ = activations((3, 256), DTYPES[dtype], rng)
    w = mx.array(random_blocks("q4_k", 5, 256, rng))
    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, lambda x: gg.quantized_matmul(x, w, "q4_k"), x)
    (y,) = mx.import_function(path)(x)
    assert y.dtype == DTYPES[dtype]
    # One rounding each, which may fall to either side.
    assert close(y, gg.quantized_matmul(x, w, "q4_k"), {"f16": 2**-10, "bf16": 2**-7}[dtype])


@pytest.mark.parametrize("qtype", TYPES)
def test_dequantised_values_are_equal_to_the_bit(qtype, tmp_path):
    w = mx.array(random_blocks(qtype, 5, 512, np.random.default_rng(1), extreme=True))
    with gg.native_ops():
        native = gg.dequantize(w, qtype)
    assert mx.array_equal(native, gg.dequantize(w, qtype))


def test_native_operations_take_empty_arrays():
    with gg.native_ops():
        for M, N, K in ((0, 4, 256), (2, 0, 256), (2, 4, 0)):
            w = mx.zeros((N, K // 256 * 144), mx.uint8)
            y = gg.quantized_matmul(mx.ones((M, K)), w, "q4_k")
            assert np.array_equal(y, np.zeros((M, N)))
            assert np.array(gg.dequantize(w, "q4_k")).shape == (N, K)


def test_weights_may_be_arguments(tmp_path):
    rng = np.random.default_rng(0)
    path = str(tmp_path / "f.mlxfn")
    x, _ = activations((2, 256), mx.float32, rng)
    w = mx.array(random_blocks("q6_k", 10, 256, rng))

    def fun(x, w):
        return gg.quantized_matmul(x, w[::2], "q6_k")

    mx.export_function(path, fun, mx.zeros_like(x), mx.zeros_like(w))
    assert close(mx.import_function(path)(x, w)[0], fun(x, w))


def test_a_shapeless_export_runs_into_an_error_not_into_wrong_results(tmp_path):
    # MLX's own slices and views cannot infer shapes; several shapes are several traces.
    w = mx.array(random_blocks("q6_k", 5, 256, np.random.default_rng(0)))
    path = str(tmp_path / "f.mlxfn")
    fun = lambda x: gg.quantized_matmul(x, w, "q6_k")  # noqa: E731
    mx.export_function(path, fun, mx.zeros((2, 256)), shapeless=True)
    with pytest.raises(ValueError, match="cannot infer output shapes"):
        mx.import_function(path)(mx.zeros((3, 256)))


def test_exporter_holds_several_traces(tmp_path):
    rng = np.random.default_rng(0)
    w = mx.array(random_blocks("q8_0", 5, 64, rng))
    path = str(tmp_path / "f.mlxfn")

    def fun(x, c=None):
        if c is None:
            return gg.quantized_matmul(x, w, "q8_0")
        return gg.quantized_addmm(c, x, w, "q8_0")

    assert mx.exporter is gg.exporter
    with mx.exporter(path, fun) as export:
        export(mx.zeros((1, 64)))
        export(mx.zeros((2, 64)))
        export(mx.zeros((2, 64)), c=mx.zeros((5,)))
    imported = mx.import_function(path)
    for M, options in ((1, {}), (2, {}), (2, {"c": mx.arange(5.0)})):
        x, _ = activations((M, 64), mx.float32, rng)
        assert close(imported(x, **options)[0], fun(x, **options))
    with pytest.raises(ValueError, match="import_function"):
        imported(mx.zeros((3, 64)))


def test_a_module_is_exported(tmp_path):
    rng = np.random.default_rng(0)
    raw = mx.array(random_blocks("q4_k", 256, 256, rng))
    layer = gg.nn.QuantLinear.from_packed(raw, "q4_k", mx.arange(256.0))
    x, _ = activations((2, 256), mx.float32, rng)
    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, lambda x: layer(layer(x) * 0.01), x)
    assert close(mx.import_function(path)(x)[0], layer(layer(x) * 0.01), 1e-5)


def test_functions_without_our_operations_export_as_before(tmp_path):
    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, lambda x: x * 2, mx.array(1.0))
    assert mx.import_function(path)(mx.array(3.0))[0].item() == 6.0


def test_the_operations_are_our_own_again_after_an_export_that_fails(tmp_path):
    def broken(x):
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        mx.export_function(str(tmp_path / "unused"), broken, mx.array(1.0))
    from mlx_gguf import _ext

    assert not _ext.native_ops()
    with gg.native_ops(), gg.native_ops():
        assert _ext.native_ops()
    assert not _ext.native_ops()
