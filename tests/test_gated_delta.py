"""The gated delta rule as one operation, against float64 and mlx-lm's own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta as theirs

from mlx_gguf import _ext, gated_delta
from mlx_gguf.gated_delta import gated_delta_ops
from oracle import DTYPES, float64, relative_error, rounded

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def random_inputs(rng, dtype=mx.float32, B=1, T=7, Hk=2, Hv=4, R=32, D=64):
    """q, k, v, g, beta and state of an operation, with sizes as layers have them."""

    def numbers(*shape):
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    q, k = (numbers(B, T, Hk, D) / D**0.5 for _ in range(2))
    g, beta = mx.sigmoid(2 * numbers(B, T, Hv) + 2), mx.sigmoid(numbers(B, T, Hv))
    v, state = numbers(B, T, Hv, R), numbers(B, Hv, R, D)
    q, k, v, beta = (a.astype(dtype) for a in (q, k, v, beta))
    return [q, k, v, g, beta, state]


def delta64(q, k, v, g, beta, state, mask=None):
    q, k, v, g, beta, S = (float64(a) for a in (q, k, v, g, beta, state))
    y = np.zeros(v.shape)
    for b, t, h in np.ndindex(*g.shape):
        if mask is None or mask[b, t]:
            key = h // (v.shape[2] // k.shape[2])
            S[b, h] *= g[b, t, h]
            delta = beta[b, t, h] * (v[b, t, h] - S[b, h] @ k[b, t, key])
            S[b, h] += np.outer(delta, k[b, t, key])
            y[b, t, h] = S[b, h] @ q[b, t, key]
    return y, S


def check(inputs, mask=None):
    y, state = gated_delta_ops(*inputs, mask if mask is None else mx.array(mask))
    ref, last = delta64(*inputs, mask)
    assert (y.dtype, state.dtype) == (inputs[0].dtype, mx.float32)
    assert relative_error(float64(state), last) < 2e-6
    dtype, size = y.dtype, np.abs(ref).max(initial=0)
    low, high = (rounded(ref + sign * 4e-6 * size, dtype) for sign in (-1, 1))
    assert ((low <= float64(y)) & (float64(y) <= high)).all()
    return y, state


@dtypes
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 64, 65, 200])
def test_equals_float64(dtype, T, rng):
    check(random_inputs(rng, dtype, T=T))


@dtypes
@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 3, "Hk": 1, "Hv": 1, "R": 16, "D": 32},
        {"B": 2, "Hk": 2, "Hv": 6, "R": 128, "D": 128},
        {"Hk": 3, "Hv": 3, "R": 48, "D": 96},
        {"Hk": 1, "Hv": 2, "R": 256, "D": 256},
    ],
    ids=str,
)
def test_sizes_of_heads(dtype, sizes, rng):
    check(random_inputs(rng, dtype, T=19, **sizes))


@dtypes
def test_tokens_that_do_not_count(dtype, rng):
    inputs, mask = random_inputs(rng, dtype, B=3, T=37), rng.uniform(size=(3, 37)) < 0.5
    mask[1], mask[2, -20:] = False, False
    y, state = check(inputs, mask)
    assert not float64(y)[~mask].any()
    assert mx.array_equal(state[1], inputs[5][1])


def test_what_tokens_that_do_not_count_hold(rng):
    inputs, mask = random_inputs(rng, T=20), mx.arange(20)[None] < 15
    right = gated_delta_ops(*inputs, mask)
    for i in range(5):
        inputs[i][:, 15:] = float("nan")
    assert all(
        mx.array_equal(a, b) for a, b in zip(right, gated_delta_ops(*inputs, mask), strict=True)
    )


@dtypes
def test_tokens_may_come_in_parts(dtype, rng):
    *tokens, state = random_inputs(rng, dtype, T=100)
    whole = gated_delta_ops(*tokens, state)
    ys = []
    for first, last in ((0, 1), (1, 40), (40, 100)):
        y, state = gated_delta_ops(*(a[:, first:last] for a in tokens), state)
        ys.append(y)
    assert mx.array_equal(mx.concatenate(ys, 1), whole[0])
    assert mx.array_equal(state, whole[1])


def test_a_sequence_does_not_depend_on_others(rng):
    inputs = random_inputs(rng, B=3, T=20)
    many = gated_delta_ops(*inputs)
    one = gated_delta_ops(*(a[1:2] for a in inputs))
    assert all(mx.array_equal(a[1:2], b) for a, b in zip(many, one, strict=True))


@dtypes
def test_strides(dtype, rng):
    q, k, v, g, beta, state = random_inputs(rng, dtype, B=2, T=18)
    plain = gated_delta_ops(q, k, v, g, beta, state)
    wide = mx.concatenate([q.reshape(2, 18, -1), v.reshape(2, 18, -1)], -1)
    cut = wide[..., q.size // 36 :].reshape(v.shape)
    turned = [a.swapaxes(1, 2) + 0 for a in (q, k, g, beta)]
    q, k, g, beta = (a.swapaxes(1, 2) for a in turned)
    across = (state.swapaxes(2, 3) + 0).swapaxes(2, 3)
    other = gated_delta_ops(q, k, cut, g, beta, across)
    assert all(mx.array_equal(a, b) for a, b in zip(plain, other, strict=True))


def test_without_a_state_it_starts_from_zeros(rng):
    *tokens, state = random_inputs(rng)
    none, zeros = gated_delta_ops(*tokens), gated_delta_ops(*tokens, mx.zeros_like(state))
    assert all(mx.array_equal(a, b) for a, b in zip(none, zeros, strict=True))


@dtypes
def test_is_close_to_mlx_lm(dtype, rng):
    inputs = random_inputs(rng, dtype, T=33)
    ours, ref = gated_delta_ops(*inputs), gated_delta._mlx_gated_delta_ops(*inputs)
    for a, b in zip(ours, ref, strict=True):
        assert a.dtype == b.dtype
        error = relative_error(float64(a), float64(b))
        assert error < (2e-6 if a.dtype == mx.float32 else 2**-7)


@pytest.mark.parametrize("masked", [False, True])
def test_derivatives_are_those_of_mlx_lm(masked, rng):
    inputs = random_inputs(rng, B=2, T=5, D=32, R=16)
    mask = mx.array(rng.uniform(size=(2, 5)) < 0.6) if masked else None

    def loss(function):
        def of(*inputs):
            y, state = function(*inputs, mask)
            if mask is not None:  # what others give is nobody's concern
                y = mx.where(mask[..., None, None], y, 0)
            return (y**2).sum() + (state**3).mean()

        return of

    args = list(range(6))
    ours = mx.value_and_grad(loss(gated_delta_ops), args)(*inputs)
    ref = mx.value_and_grad(loss(gated_delta._mlx_gated_delta_ops), args)(*inputs)
    assert mx.allclose(ours[0], ref[0], rtol=1e-5)
    assert all(
        mx.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours[1], ref[1], strict=True)
    )
    tangents = [mx.array(rng.standard_normal(a.shape).astype(np.float32)) for a in inputs]
    ours, ref = (
        mx.jvp(loss(f), inputs, tangents)[1][0]
        for f in (gated_delta_ops, gated_delta._mlx_gated_delta_ops)
    )
    assert mx.allclose(ours, ref, rtol=1e-4)


def test_vmap_and_compile(rng):
    inputs = random_inputs(rng, B=2, T=5)
    y, state = gated_delta_ops(*inputs)
    compiled = mx.compile(gated_delta_ops)(*inputs)
    assert mx.array_equal(compiled[0], y)
    assert mx.array_equal(compiled[1], state)
    many = [mx.stack([a, a / 2]) for a in inputs]
    # One argument mapped along another axis, one not at all.
    many[2], many[3] = mx.moveaxis(many[2], 0, 2), inputs[3]
    mapped = mx.vmap(lambda *a: tuple(gated_delta_ops(*a)), in_axes=(0, 0, 2, None, 0, 0))(*many)
    for i in range(2):
        one = gated_delta_ops(*(a / 2**i if n != 3 else a for n, a in enumerate(inputs)))
        assert mx.array_equal(mapped[0][i], one[0])
        assert mx.array_equal(mapped[1][i], one[1])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda a: a | {"beta": a["beta"].astype(mx.float16)}, id="dtypes"),
        pytest.param(lambda a: a | {"g": mx.stack([a["g"]] * 64, -1)}, id="decays of numbers"),
        pytest.param(lambda a: {n: x[..., :48] if n in "qkstate" and x.shape[-1] == 64 else x
                                for n, x in a.items()}, id="width"),
        pytest.param(lambda a: a | {"v": a["v"][..., :24], "state": a["state"][:, :, :24]},
                     id="rows"),
    ],
)  # fmt: skip
def test_what_ours_does_not_take_goes_to_mlx_lm(change, rng):
    names = ["q", "k", "v", "g", "beta", "state"]
    inputs = change(dict(zip(names, random_inputs(rng), strict=True)))
    assert _ext.gated_delta(*inputs.values(), None) is None
    ours = gated_delta_ops(*inputs.values())
    ref = gated_delta._mlx_gated_delta_ops(*inputs.values())
    assert all(mx.array_equal(a, b) for a, b in zip(ours, ref, strict=True))


def test_axes_that_are_missing(rng):
    inputs = random_inputs(rng)
    for i in range(6):
        fewer = [*inputs[:i], inputs[i][0], *inputs[i + 1 :]]
        assert _ext.gated_delta(*fewer, None) is None


def test_wrong_shapes_are_mlx_errors(rng):
    q, k, v, g, beta, state = random_inputs(rng)
    with pytest.raises(ValueError, match="broadcast"):
        mx.eval(gated_delta_ops(q, k[..., :32], v, g, beta, state))


def test_install(monkeypatch):
    monkeypatch.setattr(theirs, "gated_delta_ops", gated_delta._mlx_gated_delta_ops)
    gated_delta.install()
    gated_delta.install()
    assert theirs.gated_delta_ops is gated_delta_ops
