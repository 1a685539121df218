"""4,096 tokens: a prompt in chunks through the cache equals one pass without any."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import mlx_gguf as gg
from reference import hybrid, models
from reference.compare import relative_l2

LENGTH = 4096


def load(family, name, folder, monkeypatch=None, **changes):
    """A model of `family`, with fewer layers and heads where `changes` say so."""
    if changes:
        small = replace(family.spec(name), **changes)
        monkeypatch.setattr(family, "spec", lambda _: small)
    family.write_model(name, folder / "m.gguf")
    return gg.load(folder / "m.gguf", dtype=mx.float32)[0]


def tokens(seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, 300, LENGTH))


# MLX's attention on the CPU takes most of the time: few heads, then, and two or three layers.
@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        (hybrid, "qwen35", {"layers": 2, "interval": 2, "heads": 2, "kv_heads": 1}),
        (models, "gemma3", {"layers": 2, "pattern": 2, "heads": 2, "kv_heads": 1}),
    ],
    ids=["qwen35", "gemma3"],
)
def test_chunks_equal_one_pass(family, name, changes, tmp_path, monkeypatch):
    model = load(family, name, tmp_path, monkeypatch, **changes)
    prompt = tokens()
    logits = model(prompt[None])[0, -1]
    want = logits - mx.logsumexp(logits)
    steps = generate_step(prompt, model, max_tokens=1, prefill_step_size=500)
    _, got = next(steps)
    assert relative_l2(got, want) < 5e-5


def test_gemma3_decodes_through_rotating_caches(tmp_path):
    model = load(models, "gemma3", tmp_path)
    cache = make_prompt_cache(model)
    kinds = [type(c) for c in cache]
    assert kinds.count(RotatingKVCache) == 5
    assert kinds.count(KVCache) == 2
    prompt, later = tokens()[:600], tokens(1)[:40]
    want = model(mx.concatenate([prompt, later])[None])[0, 599:]
    got = [model(prompt[None], cache=cache)[0, -1]]
    got += [model(token[None, None], cache=cache)[0, -1] for token in later]
    assert relative_l2(mx.stack(got), want) < 5e-5
    windows = [c.keys.shape[2] for c in cache if isinstance(c, RotatingKVCache)]
    assert max(windows) < 600
