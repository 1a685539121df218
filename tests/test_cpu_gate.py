"""SiLU and GELU on the CPU, against float64 and MLX's own; and Gemma's norm."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_gguf import cpu_fast
from mlx_gguf.models.gemma3 import PlusOneNorm, add_one_once
from oracle import DTYPES, activations, float64, rounded

GATES = {
    "silu": (cpu_fast.silu, cpu_fast._mlx_silu),
    "gelu_approx": (cpu_fast.gelu_approx, cpu_fast._mlx_gelu_approx),
}
gates = pytest.mark.parametrize("name", GATES)

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def gate64(name: str, x: np.ndarray) -> np.ndarray:
    z = x if name == "silu" else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return x / (1 + np.exp(-z))


@gates
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (2, 5, 300), (40, 1000), (3, 0)])
def test_equals_float64(name, dtype, shape, rng):
    x, _ = activations(shape, dtype, rng)
    for scale in (0.01, 1, 8):
        y, ref = GATES[name][0](scale * x), gate64(name, X := float64(scale * x))
        assert y.dtype == dtype
        slack = 2e-6 * np.abs(X)
        low, high = rounded(ref - slack, dtype), rounded(ref + slack, dtype)
        assert ((low <= float64(y)) & (float64(y) <= high)).all()


@gates
def test_strides(name, rng):
    x, _ = activations((6, 50, 4), mx.float32, rng)
    ours, _ = GATES[name]
    assert mx.array_equal(ours(x.transpose(2, 0, 1)), ours(x).transpose(2, 0, 1))
    assert mx.array_equal(ours(x[:, ::2]), ours(x)[:, ::2])


@gates
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_ends_of_the_range_are_those_of_mlx(name, dtype):
    inf = float("inf")
    x = mx.array([inf, -inf, float("nan"), 0.0, -0.0, 90, -90, 200, -200, 6e4, -6e4], dtype)
    ours, theirs = (float64(gate(x)) for gate in GATES[name])
    assert np.allclose(ours, theirs, rtol=1e-2 if dtype != mx.float32 else 1e-6, equal_nan=True)
    assert (np.signbit(ours[3:5]) == [False, True]).all()


@gates
def test_transformations_are_those_of_mlx(name, rng):
    x, _ = activations((4, 33), mx.float32, rng)
    ours, theirs = GATES[name]

    def gradient(gate):
        return mx.grad(lambda x: (gate(x) ** 2).sum())(x)

    assert mx.allclose(gradient(ours), gradient(theirs), rtol=1e-5, atol=1e-6)
    assert mx.allclose(mx.vmap(ours, 1, 1)(x), theirs(x), rtol=1e-5, atol=1e-6)
    compiled = mx.compile(lambda x: ours(x) * x, shapeless=True)
    for part in (x, x[:2], x[:, :5]):
        assert mx.array_equal(compiled(part), ours(part) * part)
    both = mx.compile(lambda x: (cpu_fast.silu(x), cpu_fast.gelu_approx(x)))
    assert not mx.array_equal(*both(x))


@gates
def test_what_ours_do_not_take_goes_to_mlx(name):
    ours, theirs = GATES[name]
    whole = mx.arange(-3, 4)
    assert mx.array_equal(ours(whole), theirs(whole))
    assert ours(mx.array(2.0)).item() == pytest.approx(theirs(mx.array(2.0)).item())


class RMSNorm(nn.Module):
    """As in mlx-lm's Gemma."""

    def __init__(self, weight: mx.array):
        super().__init__()
        self.weight, self.eps = weight, 1e-6

    def __call__(self, x):
        return mx.fast.rms_norm(x, 1.0 + self.weight, self.eps)


def test_a_norm_that_adds_one_once_equals_one_that_always_does(rng):
    weights = [activations((24,), mx.float32, rng)[0] for _ in range(2)]
    x, _ = activations((3, 24), mx.float32, rng)
    theirs, ours = RMSNorm(weights[0]), RMSNorm(weights[0])
    add_one_once(ours)
    assert type(ours) is PlusOneNorm
    for _ in range(2):
        assert mx.array_equal(ours(x), theirs(x))
    assert list(ours.parameters()) == ["weight"]
    for norm in (ours, theirs):  # new weights count at once
        norm.update({"weight": weights[1]})
    assert mx.array_equal(ours(x), theirs(x))

    def gradients(norm):
        return nn.value_and_grad(norm, lambda x: (norm(x) ** 2).sum())(x)[1]["weight"]

    assert mx.array_equal(gradients(ours), gradients(theirs))
    assert mx.array_equal(ours(x), theirs(x))  # and not those of the gradient's trace
