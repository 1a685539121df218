"""What loading does where MLX has CUDA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_gguf as gg
import step_support
from blocks import random_blocks
from mlx_gguf import _ext, step
from mlx_gguf.ahead import compile_ahead
from mlx_gguf.fused import fuse
from mlx_gguf.nn import QuantLinear
from reference import hybrid, models, variants
from step_support import error, feed

steps = step_support.steps  # the fixture

on_gpu = pytest.mark.skipif("cuda" not in _ext.backends(), reason="needs CUDA")
BACKEND = Path(str(_ext.__file__)).parent / "_cuda.so"


@pytest.mark.skipif(not BACKEND.exists(), reason="built without CUDA's headers")
def test_the_backend_needs_only_what_mlx_exports():
    """It is linked where MLX has no CUDA, so that a missing symbol would show on a GPU alone."""
    names = re.findall(rb"_ZNK?3mlx4core2cu\w+", BACKEND.read_bytes())
    exported = rb"_ZNK?3mlx4core2cu(14CommandEncoder|6Device|6device|19get_command_encoder)"
    assert names
    assert [name for name in names if not re.match(exported, name)] == []


@pytest.fixture
def packed_model(tmp_path, rng):
    """Writes a tiny model all of whose matrices are packed, as steps want them."""

    def write(name: str) -> Path:
        blocks = {
            key: (
                "q8_0",
                random_blocks("q8_0", len(f16), f16.shape[1] // 2, rng, size=(0.02, 0.04)),
            )
            for key, (qtype, f16) in models.tensors(name).items()
            if qtype in ("f16", "bf16")
        }
        models.write_model(name, tmp_path / "model.gguf", blocks)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_loaded_models_can_have_steps(name, monkeypatch, packed_model):
    monkeypatch.setenv("MLX_GGUF_CUDA_STEP", "0")
    model, _ = gg.load(packed_model(name))
    assert step.install(model)


@on_gpu
@pytest.mark.parametrize("value", [None, "1", "0"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_tokens_are_steps_unless_told_otherwise(name, value, monkeypatch, steps, packed_model):
    if value is None:
        monkeypatch.delenv("MLX_GGUF_CUDA_STEP", raising=False)
    else:
        monkeypatch.setenv("MLX_GGUF_CUDA_STEP", value)
    model, _ = gg.load(packed_model(name))
    ids = [1, 2, 3, 4, 5, 6]
    got = feed(model, make_prompt_cache(model), ids, [4, 1, 1])
    assert steps == ([] if value == "0" else [4, 5])
    assert error(got, feed(model, make_prompt_cache(model), ids, [6])) < 0.03


@on_gpu
def test_a_file_is_uploaded_when_it_is_evaluated(packed_model):
    file = gg.open(packed_model("llama"))
    for name in file.tensors:
        lazy = file._array(name, True)
        assert mx.array_equal(lazy, file[name]).item(), name
        # Beside one in another order: that of the first is known.
        other = mx.arange(lazy.size).astype(lazy.dtype).reshape(lazy.shape[::-1]).T
        assert mx.array_equal(lazy + other, file[name] + other).item(), name


def test_a_models_products_are_what_is_compiled_ahead(monkeypatch):
    model = step_support.build("llama", mx.float16)
    asked: list[tuple[object, ...]] = []
    functions: list[str] = []

    def compile(products, names):
        asked.extend(products)
        functions.extend(names)

    monkeypatch.setattr(_ext, "cuda_compile", compile)
    compile_ahead(model, mx.float16)
    layers = [m for m in model.modules() if isinstance(m, QuantLinear) and m._part is None]
    wanted = {(m.qtype, "float16", M, *m._logical_shape(), 0, True) for m in layers for M in (1, 9)}
    assert len(wanted) > 4
    assert wanted <= set(asked)
    assert functions == []
    fuse(model)
    assert step.install(model)
    compile_ahead(model, mx.float16)
    assert {name.partition("<")[0] for name in functions} == {"rms_norm", "gated", "attend"}
    embedding = model.model.embed_tokens
    assert (embedding.qtype, "float16", 0, *embedding._logical_shape(), 0, True) in asked


def test_compiling_ahead_refuses_what_is_no_product():
    _ext.cuda_compile([])
    with pytest.raises(ValueError, match=r"\[cuda_compile\] .* Received 'q9_k'"):
        _ext.cuda_compile([("q9_k", "float16", 1, 8, 256, 0, True)])
    with pytest.raises(ValueError, match=r"\[cuda_compile\] Expected a dtype of .* Received int8"):
        _ext.cuda_compile([("q4_k", "int8", 1, 8, 256, 0, True)])
    for M, N, K, experts in ((-1, 8, 256, 0), (1, 0, 256, 0), (1, 8, 0, 0), (1, 8, 256, -1)):
        with pytest.raises(ValueError, match=r"\[cuda_compile\] Expected N and K of at least 1"):
            _ext.cuda_compile([("q4_k", "float16", M, N, K, experts, True)])


_FIRST_TOKENS = """
import sys
from pathlib import Path
import mlx.core as mx, mlx_gguf as gg
from mlx_lm.models.cache import make_prompt_cache
model, _ = gg.load(sys.argv[1])
cubins = lambda: {p.name for p in Path(sys.argv[2]).rglob("*.cubin")}
before = cubins()
cache = make_prompt_cache(model)
for ids in ([*range(1, 13)], [3], [4]):
    mx.eval(model(mx.array([ids]), cache=cache))
print(len(before), *sorted(cubins() - before))
"""


@on_gpu
@pytest.mark.parametrize(
    ("source", "name"),
    [(models, "llama"), (variants, "qwen3moe"), (hybrid, "qwen35"), (hybrid, "qwen35moe")],
)
def test_first_tokens_compile_nothing(source, name, tmp_path):
    path = tmp_path / "model.gguf"
    source.write_model(name, path)
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _FIRST_TOKENS, str(path), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True)
    made, *later = done.stdout.split()
    assert int(made) >= 4
    assert later == []
