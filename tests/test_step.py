"""A token's layers in one operation: the same logits, and caches that stay usable."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import step_support
from mlx_gguf import step
from mlx_gguf.models.llama import DividedRope
from step_support import VARIANTS, build, error, feed, ids_of, in_caches, stepping

steps = step_support.steps  # the fixture


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_caches_are_those_of_the_layers(variant, steps):
    model, plain = stepping(variant), build(variant)
    ids = ids_of(30)
    caches = [make_prompt_cache(m) for m in (model, plain)]
    got = feed(model, caches[0], ids, [5] + [1] * 25)
    want = feed(plain, caches[1], ids, [30])
    assert steps == list(range(5, 30))
    assert error(got, want) < 1e-5
    assert error(*map(in_caches, caches)) < 1e-5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "qwen3.5-tiled"])
def test_steps_in_16_bits_are_as_exact_as_the_layers(variant, dtype, steps):
    right = build(variant)
    ids = ids_of(30)
    errors = []
    for model in (stepping(variant, dtype), build(variant, dtype)):
        for name, module in model.named_modules():  # the same numbers in all
            if isinstance(module, nn.RMSNorm) or "bias" in module:
                key = "weight" if isinstance(module, nn.RMSNorm) else "bias"
                same = dict(right.named_modules())[name]
                same[key] = module[key].astype(mx.float32)
        want = feed(right, make_prompt_cache(right), ids, [30])
        got = feed(model, make_prompt_cache(model), ids, [5] + [1] * 25)
        errors.append(error(got[:, 5:], want[:, 5:]))
    assert len(steps) == 25
    assert errors[0] < 1.2 * errors[1]


def test_layers_of_one_type_and_of_many(steps):
    for types in ({}, {"q_proj": "q5_k", "k_proj": "iq4_nl", "up_proj": "q8_0"}):
        model, plain = stepping("qwen2", types=types), build("qwen2", types=types)
        ids = ids_of(8)
        got = feed(model, make_prompt_cache(model), ids, [2] + [1] * 6)
        assert error(got, feed(plain, make_prompt_cache(plain), ids, [8])) < 1e-5
    assert len(steps) == 12


@pytest.mark.parametrize("factors", [1.0, 2.0])
def test_the_rope_of_files_with_factors(factors, steps):
    model, plain = build("llama-traditional"), build("llama-traditional")
    rope = DividedRope(64, 3e3, mx.linspace(1, factors, 32))
    for layer in (*model.layers, *plain.layers):
        layer.self_attn.rope = rope
    assert step.install(model)
    ids = ids_of(12)
    got = feed(model, make_prompt_cache(model), ids, [2] + [1] * 10)
    assert error(got, feed(plain, make_prompt_cache(plain), ids, [12])) < 1e-5
    assert len(steps) == 10


@pytest.mark.parametrize("pairs", [8, 20])
def test_a_rope_of_a_part_of_a_head(pairs, steps):
    model, plain = build("llama"), build("llama")
    for layer in (*model.layers, *plain.layers):
        layer.self_attn.rope = nn.RoPE(2 * pairs, base=500.0)
    assert step.install(model)
    ids = ids_of(8)
    got = feed(model, make_prompt_cache(model), ids, [2] + [1] * 6)
    assert error(got, feed(plain, make_prompt_cache(plain), ids, [8])) < 1e-5
    assert len(steps) == 6


# Caches


@pytest.mark.parametrize(("first", "count"), [(250, 270), (255, 260), (256, 260), (1100, 1104)])
def test_caches_grow(first, count, steps):
    model, plain = stepping("llama"), build("llama")
    ids = ids_of(count)
    caches = [make_prompt_cache(m) for m in (model, plain)]
    got = feed(model, caches[0], ids, [first] + [1] * (count - first))
    want = feed(plain, caches[1], ids, [count])
    assert steps == list(range(first, count))
    assert error(got, want) < 1e-5
    assert error(*map(in_caches, caches)) < 1e-5


@pytest.mark.parametrize("variant", ["qwen3", "qwen3.5-tiled"])
def test_prompts_and_steps_take_turns(variant, steps):
    model, plain = stepping(variant), build(variant)
    ids = ids_of(20)
    got = feed(model, make_prompt_cache(model), ids, [3, 1, 1, 4, 1, 2, 1, 1, 6])
    assert error(got, feed(plain, make_prompt_cache(plain), ids, [20])) < 1e-5
    assert steps == [3, 4, 9, 12, 13]


def test_rewound_caches():
    model, plain = stepping("llama"), build("llama")
    ids, others = ids_of(16), [i + 1 for i in ids_of(8)]
    cache = make_prompt_cache(model)
    feed(model, cache, ids, [4] + [1] * 12)
    for count, again in ((9, [1] * 8), (8, [3, 1, 1, 3])):
        trim_prompt_cache(cache, count)
        kept = cache[0].offset
        got = feed(model, cache, others, again)
        past = make_prompt_cache(plain)
        history = ids[:7]
        assert kept == 7
        want = feed(plain, past, history + others, [7, 8])
        assert error(got, want[:, 7:]) < 1e-5
        ids = history + others


@pytest.mark.parametrize("variant", ["llama", "qwen3.5"])
@pytest.mark.parametrize("count", [3, 4])
def test_a_copied_cache_is_another(variant, count):
    model, plain = stepping(variant), build(variant)
    ids, others = ids_of(12), [5, 6, 7, 8]
    cache = make_prompt_cache(model)
    feed(model, cache, ids[:8], [8 - count] + [1] * count)
    branch = copy.deepcopy(cache)
    got = feed(model, cache, ids[8:], [1] * 4)
    other = feed(model, branch, others, [1] * 4)
    for tail, logits in ((ids[8:], got), (others, other)):
        want = feed(plain, make_prompt_cache(plain), ids[:8] + tail, [12])
        assert error(logits, want[:, 8:]) < 1e-5


def test_arrays_that_were_read_stay_what_they_were():
    model = stepping("llama")
    cache = make_prompt_cache(model)
    feed(model, cache, ids_of(8), [4] + [1] * 4)
    keys, view = cache[1].keys, cache[2].values[..., 2:5, :]
    mx.eval(keys, view)
    before = np.array(keys), np.array(view)
    trim_prompt_cache(cache, 5)
    feed(model, cache, [9] * 6, [1] * 6)
    assert np.array_equal(before[0], np.array(keys))
    assert np.array_equal(before[1], np.array(view))


def test_states_that_were_read_stay_what_they_were():
    model = stepping("qwen3.5")
    cache = make_prompt_cache(model)
    feed(model, cache, ids_of(8), [4] + [1] * 4)
    held = [*cache[0].cache, cache[2][0][:, 1:]]
    mx.eval(held)
    before = [np.array(a) for a in held]
    feed(model, cache, [9] * 6, [1] * 6)
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, held, strict=True))


def test_states_in_another_order(steps):
    model, plain = stepping("qwen3.5"), build("qwen3.5")
    ids = ids_of(9)
    cache = make_prompt_cache(model)
    feed(model, cache, ids[:5], [5])
    for c in cache[::2]:
        c[1] = mx.contiguous(c[1].swapaxes(2, 3)).swapaxes(2, 3)
    got = feed(model, cache, ids[5:], [1] * 4)
    want = feed(plain, make_prompt_cache(plain), ids, [9])[:, 5:]
    assert error(got, want) < 1e-5
    assert len(steps) == 4


@pytest.mark.parametrize("variant", ["qwen2", "qwen3.5"])
def test_saved_caches(variant, tmp_path):
    model, plain = stepping(variant), build(variant)
    ids = ids_of(12)
    cache = make_prompt_cache(model)
    feed(model, cache, ids[:8], [4] + [1] * 4)
    save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "c.safetensors"))
    kinds = {"qwen2": [KVCache] * 3, "qwen3.5": [ArraysCache, KVCache] * 2}
    assert [type(c) for c in loaded] == kinds[variant]
    want = feed(plain, make_prompt_cache(plain), ids, [12])[:, 8:]
    for c in (cache, loaded):
        assert error(feed(model, c, ids[8:], [1] * 4), want) < 1e-5


@pytest.mark.parametrize("variant", ["qwen2", "qwen3.5"])
def test_weights_that_are_read_between_steps(variant):
    """On CUDA, the memory that the host reads is elsewhere afterwards."""
    model, plain = stepping(variant), build(variant)
    ids = ids_of(14)
    cache = make_prompt_cache(model)
    got = [feed(model, cache, ids[:4], [4])]
    for token in ids[4:]:
        got.append(model(mx.array([[token]]), cache=cache))
        parameters: Any = tree_flatten(model.parameters())
        assert all(np.array(p.astype(mx.float32)).size for _, p in parameters[token % 5 :: 5])
        assert np.array(parameters[token % len(parameters)][1]).size
    want = feed(plain, make_prompt_cache(plain), ids, [14])
    assert error(mx.concatenate(got, axis=1), want) < 1e-5


def test_one_cache_taken_back_alone(steps):
    model, plain = stepping("llama"), build("llama")
    ids = ids_of(12)
    caches = [make_prompt_cache(m) for m in (model, plain)]
    feed(model, caches[0], ids[:8], [4] + [1] * 4)
    caches[0][1].values = caches[0][1].values + 0
    got = feed(model, caches[0], ids[8:], [1] * 4)
    want = feed(plain, caches[1], ids, [12])
    assert error(got, want[:, 8:]) < 1e-5
    assert error(*map(in_caches, caches)) < 1e-5
    assert len(steps) == 8


@pytest.mark.parametrize("order", [(0, 4, 2), (2, 1, 0), (0, 1, 1)])
def test_caches_in_another_company(order):
    logits = []
    for model in (stepping("llama"), build("llama")):
        caches = []
        for ids in ([1, 2, 3, 4, 5], [9, 8, 7, 6, 5]):
            caches += make_prompt_cache(model)
            feed(model, caches[-3:], ids, [3, 1, 1])
        mixed = [caches[i] for i in order]
        if len(set(order)) < 3:
            mixed[2] = copy.deepcopy(mixed[2])
        logits.append(feed(model, mixed, [11, 12], [1, 1]))
    assert error(*logits) < 1e-5


def test_what_a_lent_cache_says_of_itself():
    model = stepping("llama")
    cache = make_prompt_cache(model)
    feed(model, cache, ids_of(6), [4, 1, 1])
    lent = cache[0]
    assert type(lent) is not KVCache
    assert isinstance(lent, KVCache)
    assert (lent.size(), lent.empty(), lent.is_trimmable()) == (6, False, True)
    assert not hasattr(lent, "bits")
    nbytes = lent.nbytes
    assert type(lent) is not KVCache  # none of these asked for its arrays
    assert nbytes == lent.keys.nbytes + lent.values.nbytes
    assert type(lent) is KVCache
    model = stepping("qwen3.5")
    cache = make_prompt_cache(model)
    feed(model, cache, ids_of(6), [4, 1, 1])
    lent = cache[0]
    assert type(lent) is not ArraysCache
    assert (lent.empty(), lent.lengths) == (False, None)
    nbytes = lent.nbytes
    assert type(lent) is not ArraysCache
    assert nbytes == sum(a.nbytes for a in lent.cache)
    assert type(lent) is ArraysCache


def test_logits_that_nobody_asks_for():
    """Caches are right though only they are evaluated, and though nothing is for long."""
    model, plain = stepping("llama"), build("llama")
    ids = ids_of(10)
    caches = [make_prompt_cache(m) for m in (model, plain)]
    model(mx.array([ids[:4]]), cache=caches[0])
    for token in ids[4:8]:
        model(mx.array([[token]]), cache=caches[0])
    mx.eval([c.state for c in caches[0]])
    want = feed(plain, caches[1], ids, [8, 2])
    last = [model(mx.array([[token]]), cache=caches[0]) for token in ids[8:]]
    assert error(mx.concatenate(last, axis=1), want[:, 8:]) < 1e-5
    assert error(*map(in_caches, caches)) < 1e-5


def test_embeddings_of_another_dtype():
    """They are no step's, and the caches stay what they are."""
    model = stepping("llama")
    cache = make_prompt_cache(model)
    feed(model, cache, ids_of(4), [4])
    keys = np.array(cache[0].keys[..., :4, :])
    x = mx.zeros((1, 1, 256), mx.float16)
    assert model.model(mx.array([[1]]), cache=cache, input_embeddings=x).shape == (1, 1, 256)
    assert np.array_equal(np.array(cache[0].keys[..., :4, :]), keys)


def test_abandoned_steps_leave_nothing():
    model = stepping("llama")
    cache = make_prompt_cache(model)
    feed(model, cache, ids_of(4), [4])
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(20):
        other = copy.deepcopy(cache)
        for token in (1, 2, 3):
            model(mx.array([[token]]), cache=other)
        del other
    gc.collect()
    assert mx.get_active_memory() - before < 1 << 16


@pytest.mark.parametrize("variant", ["llama", "qwen3.5"])
def test_threads(variant, steps):
    model = stepping(variant)
    ids = ids_of(16)
    right = np.array(feed(model, make_prompt_cache(model), ids, [4] + [1] * 12))
    wrong = []

    def run() -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            for _ in range(5):
                got = feed(model, make_prompt_cache(model), ids, [4] + [1] * 12)
                if not np.allclose(np.array(got), right, rtol=1e-5, atol=1e-5):
                    wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(steps) == 16 * 12


def test_a_cache_moves_to_another_stream():
    model, plain = stepping("llama"), build("llama")
    ids = ids_of(16)
    cache = make_prompt_cache(model)
    got = [model(mx.array([ids[:4]]), cache=cache)]
    streams = [mx.new_stream(mx.default_device()) for _ in range(2)]
    for i, token in enumerate(ids[4:]):
        with mx.stream(streams[i % 2]):
            got.append(model(mx.array([[token]]), cache=cache))
    want = feed(plain, make_prompt_cache(plain), ids, [16])
    assert error(mx.concatenate(got, axis=1), want) < 1e-5
