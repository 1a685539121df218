"""Architectures that are mlx-lm's classes under other names, against PyTorch's logits."""

from __future__ import annotations

import mlx.core as mx
import pytest

import mlx_gguf as gg
from reference import variants
from reference.compare import Reference

TORCH = Reference("variants.npz")


@pytest.mark.parametrize("name", variants.MODELS)
def test_logits_and_ids_equal_pytorch(name, tmp_path):
    assert variants.fingerprint(name) == TORCH.get(name, "fingerprint")
    variants.write_model(name, tmp_path / "m.gguf")
    prompt, steps, ids = TORCH.errors(name, gg.load(tmp_path / "m.gguf", dtype=mx.float32)[0])
    assert prompt < 5e-5
    assert steps < 5e-5
    assert ids == TORCH.get(name, "greedy").tolist()


@pytest.mark.parametrize("name", variants.MODELS)
@pytest.mark.parametrize(("dtype", "limit"), [(mx.float16, 1.5e-2), (mx.bfloat16, 0.1)])
def test_logits_in_16_bits(name, dtype, limit, tmp_path):
    variants.write_model(name, tmp_path / "m.gguf")
    model, _ = gg.load(tmp_path / "m.gguf", dtype=dtype)
    assert model(mx.array([[1, 2]])).dtype == dtype
    prompt, steps, _ = TORCH.errors(name, model)
    assert prompt < limit
    assert steps < limit
