"""The CPU's fast operations in MLX's graphs: transformations, what is left to MLX, whole
models."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_gguf as gg
from mlx_gguf import cpu_fast
from oracle import activations, float64, relative_error
from reference import models
from subprocesses import run

ROPE = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": 0}
_MLX = {
    "rms_norm": cpu_fast._mlx_rms_norm,
    "rope": cpu_fast._mlx_rope,
    "scaled_dot_product_attention": cpu_fast._mlx_attention,
}

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# What MLX does with them


def attend(q, k, v, mask="causal"):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)


FUNCTIONS = {
    "rms_norm": lambda x, w: mx.fast.rms_norm(x, w, 1e-5),
    "rms_norm alone": lambda x, w: mx.fast.rms_norm(x, None, 1e-5) * w,
    "rope": lambda x, w: mx.fast.rope(x * w, 12, **ROPE | {"offset": 3}),
    "rope of an array": lambda x, w: mx.fast.rope(x * w, 12, **ROPE | {"offset": mx.array(3)}),
    "rope of frequencies": lambda x, w: mx.fast.rope(
        x * w, 16, **ROPE | {"base": None, "freqs": mx.arange(1.0, 9.0)}
    ),
    "attention": lambda x, w: attend(x, x[:, :2] * w, x[:, 2:]),
    "attention of a mask": lambda x, w: attend(
        x, x[:, :2] * w, x[:, 2:], w.sum() > x[0, 0] @ x[0, 1].T
    ),
}


@pytest.fixture
def with_mlx(monkeypatch):
    """Calls a function with MLX's own operations, and with ours."""

    def both(fun, *args):
        results = []
        for ours in (False, True):
            for name, original in _MLX.items():
                monkeypatch.setattr(mx.fast, name, getattr(cpu_fast, name) if ours else original)
            results.append(fun(*args))
            mx.eval(results[-1])
        return results

    return both


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transformations_equal_those_of_mlx(name, rng, with_mlx):
    fun = FUNCTIONS[name]
    x, _ = activations((2, 4, 5, 16), mx.float32, rng)
    w, _ = activations((16,), mx.float32, rng)
    t, _ = activations(x.shape, mx.float32, rng)
    xs, _ = activations((3, *x.shape), mx.float32, rng)

    def same(f, *args):
        ours, expected = reversed(with_mlx(f, *args))
        for a, b in zip(ours, expected, strict=True):
            assert a.shape == b.shape
            assert mx.allclose(a, b, rtol=1e-5, atol=2e-6), name

    same(lambda x, w: [fun(x, w)], x, w)
    same(lambda x, w: mx.grad(lambda x, w: (fun(x, w) * t).sum(), argnums=(0, 1))(x, w), x, w)
    same(lambda x, w: mx.vjp(fun, [x, w], [t])[1], x, w)
    same(lambda x, w: mx.jvp(fun, [x, w], [t, w])[1], x, w)
    same(lambda xs, w: [mx.vmap(fun, in_axes=(0, None))(xs, w)], xs, w)
    same(lambda xs, w: [mx.vmap(fun, in_axes=(3, None))(xs.transpose(1, 2, 3, 0, 4), w)], xs, w)
    same(lambda x, w: [mx.compile(fun)(x, w)], x, w)
    same(
        lambda x, w: [mx.grad(lambda x: mx.grad(lambda x: (fun(x, w) ** 2).sum())(x).sum())(x)],
        x,
        w,
    )


def test_compiled_functions_keep_their_parameters_apart(rng):
    """Nodes of one kind with other parameters are not merged."""
    x, _ = activations((1, 2, 6, 16), mx.float32, rng)
    calls = [
        *(lambda x, e=e: cpu_fast.rms_norm(x, None, e) for e in (1e-5, 1e-1)),
        *(lambda x, s=s: cpu_fast.scaled_dot_product_attention(x, x, x, scale=s) for s in (0.1, 1)),
        *(lambda x, m=m: cpu_fast.scaled_dot_product_attention(x, x, x, scale=1.0, mask=m)
          for m in (None, "causal")),
        *(lambda x, c=c: cpu_fast.rope(x, 16, **ROPE | c)
          for c in ({"offset": 1}, {"offset": 2}, {"traditional": True}, {"scale": 0.5},
                    {"base": 99.0})),
        lambda x: cpu_fast.rope(x, 8, **ROPE | {"offset": 1}),
    ]  # fmt: skip
    # MLX never merges what a function returns, so that is the next node.
    together = mx.compile(lambda x: [-f(x) for f in calls])(x)
    for i, (f, y) in enumerate(zip(calls, together, strict=True)):
        assert mx.array_equal(y, -f(x)), i


def test_shapeless_compilation(rng):
    fun = mx.compile(
        lambda x: cpu_fast.scaled_dot_product_attention(
            cpu_fast.rope(x, 16, **ROPE), cpu_fast.rms_norm(x, None, 1e-5), x, scale=1.0
        ),
        shapeless=True,
    )
    for n in (3, 7):
        x, _ = activations((1, 2, n, 16), mx.float32, rng)
        k = cpu_fast.rms_norm(x, None, 1e-5)
        expected = cpu_fast.scaled_dot_product_attention(
            cpu_fast.rope(x, 16, **ROPE), k, x, scale=1.0
        )
        assert mx.allclose(fun(x), expected, atol=1e-6)


def test_what_ours_do_not_take_goes_to_mlx(rng):
    x, _ = activations((1, 2, 4, 16), mx.float32, rng)
    sinks = mx.zeros((2,))
    y = cpu_fast.scaled_dot_product_attention(x, x, x, scale=1.0, sinks=sinks)
    assert mx.array_equal(y, cpu_fast._mlx_attention(x, x, x, scale=1.0, sinks=sinks))
    wide = x.astype(mx.float64)
    assert mx.array_equal(
        cpu_fast.rms_norm(wide, None, 1e-5), cpu_fast._mlx_rms_norm(wide, None, 1e-5)
    )
    long = ROPE | {"offset": mx.array(3, mx.int64)}
    assert mx.array_equal(cpu_fast.rope(x, 16, **long), cpu_fast._mlx_rope(x, 16, **long))


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f["rms_norm"](x, mx.ones((3,)), 1e-5),
        lambda f, x: f["rms_norm"](mx.array(1.0), None, 1e-5),
        lambda f, x: f["rms_norm"](mx.array([1, 2]), None, 1e-5),
        lambda f, x: f["rope"](x, 5, **ROPE),
        lambda f, x: f["rope"](x, 32, **ROPE),
        lambda f, x: f["rope"](x[0, 0], 16, **ROPE),
        lambda f, x: f["rope"](x, 16, **ROPE | {"base": None}),
        lambda f, x: f["rope"](x, 16, **ROPE | {"offset": mx.array([1, 2, 3])}),
        lambda f, x: f["rope"](x, 16, **ROPE | {"freqs": mx.ones((8,))}),
        lambda f, x: f["scaled_dot_product_attention"](x, x[..., :8], x, scale=1.0),
        lambda f, x: f["scaled_dot_product_attention"](x[0], x[0], x[0], scale=1.0),
        lambda f, x: f["scaled_dot_product_attention"](x, x, x, scale=1.0, mask="window"),
        lambda f, x: f["scaled_dot_product_attention"](x, x, x, scale=1.0, mask=mx.zeros((3, 3))),
        lambda f, x: f["scaled_dot_product_attention"](
            *(3 * [x.astype(mx.float16)]), scale=1.0, mask=mx.zeros((4, 4))
        ),
    ],
)
def test_errors_are_those_of_mlx(call, rng):
    x, _ = activations((1, 2, 4, 16), mx.float32, rng)
    with pytest.raises(ValueError, match=r"\[") as expected:
        mx.eval(call(_MLX, x))
    with pytest.raises(ValueError, match=r"\[") as error:
        mx.eval(call({name: getattr(cpu_fast, name) for name in _MLX}, x))
    assert str(error.value) == str(expected.value)


# In a model


@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_gives_the_same_logits(name, tmp_path, with_mlx):
    path = tmp_path / f"{name}.gguf"
    models.write_model(name, path)
    tokens = mx.array([[1, 5, 3, 7, 2, 9, 4]])

    model, _ = gg.load(path, dtype=mx.float32)
    expected, ours = with_mlx(lambda: model(tokens))
    assert relative_error(float64(ours), float64(expected)) < 1e-5
    assert not mx.array_equal(ours, expected)  # they are not the same code


def test_training_gives_the_same_gradients(with_mlx, rng):
    layer = nn.MultiHeadAttention(32, 4)
    norm = nn.RMSNorm(32)
    x, _ = activations((2, 6, 32), mx.float32, rng)

    def gradients():
        return mx.grad(lambda x: (layer(norm(x), norm(x), x) ** 2).sum())(x)

    expected, ours = with_mlx(gradients)
    assert mx.allclose(ours, expected, rtol=1e-5, atol=1e-6)


INSTALL = """
import mlx.core as mx, mlx.nn as nn, mlx_gguf
from mlx_gguf import cpu_fast
before = mx.fast.rms_norm
assert before is cpu_fast._mlx_rms_norm
done = [cpu_fast.install(), cpu_fast.install()]
print(done, mx.fast.rms_norm is cpu_fast.rms_norm, mx.fast.rope is cpu_fast.rope,
      mx.fast.scaled_dot_product_attention is cpu_fast.scaled_dot_product_attention,
      nn.silu is cpu_fast.silu, nn.gelu_approx is cpu_fast.gelu_approx)
"""


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False)])
def test_install(value, on):
    assert run(INSTALL, MLX_GGUF_CPU_FAST=value).split() == f"[{on}, {on}]{f' {on}' * 5}".split()


def test_an_exported_function_needs_nothing_of_ours(tmp_path, rng, monkeypatch):
    for name in _MLX:
        monkeypatch.setattr(mx.fast, name, getattr(cpu_fast, name))
    x, _ = activations((1, 4, 5, 16), mx.float32, rng)
    w = mx.ones((16,))

    def fun(x):
        x = cpu_fast.gelu_approx(x)
        return attend(FUNCTIONS["rope"](x, w), FUNCTIONS["rms_norm"](x, w), x)

    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, fun, x)
    code = (
        "import sys, mlx.core as mx\n"
        "y = mx.import_function(sys.argv[1])(mx.load(sys.argv[2]))[0]\n"
        "assert 'mlx_gguf' not in sys.modules\n"
        "mx.save(sys.argv[3], y)\n"
    )
    mx.save(str(tmp_path / "x.npy"), x)
    run(code, path, str(tmp_path / "x.npy"), str(tmp_path / "y.npy"))
    assert mx.allclose(mx.load(str(tmp_path / "y.npy")), fun(x), atol=1e-6)
