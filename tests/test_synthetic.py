"""The synthetic Qwen3.5 file of the benchmarks: its table, and that it runs."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_gguf as gg

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "synthetic.py"


@pytest.fixture(scope="module")
def synthetic():
    spec = importlib.util.spec_from_file_location("synthetic", SCRIPT)
    module = sys.modules["synthetic"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["synthetic"]


@pytest.fixture(scope="module")
def path(synthetic, tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "small.gguf"
    synthetic.write(path, synthetic.SMALL)
    return path


def test_the_table_is_that_of_the_4b(synthetic):
    table = {t.name: t for t in synthetic.tensor_table(synthetic.Sizes())}
    # 24 layers of 14 tensors, 8 of 11, the embedding and the last norm.
    assert len(table) == 24 * 14 + 8 * 11 + 2
    assert sum(math.prod(t.shape) for t in table.values()) == 4_205_751_296
    assert sum(map(synthetic.nbytes, table.values())) == pytest.approx(2.9e9, rel=0.01)
    assert table["blk.0.attn_qkv.weight"].shape == (8192, 2560)
    assert table["blk.3.attn_q.weight"].shape == (8192, 2560)
    assert table["blk.3.attn_k.weight"].shape == (1024, 2560)
    types: dict[str, set[str]] = {}
    for name, t in table.items():
        types.setdefault(name.removesuffix(".weight").split(".")[-1], set()).add(t.qtype)
    assert types["token_embd"] == {"q6_k"}
    assert types["attn_qkv"] == types["attn_gate"] == {"q5_k"}
    assert types["ssm_out"] == {"q8_0"}
    assert types["ssm_alpha"] == types["ssm_beta"] == {"f16"}
    assert types["ffn_gate"] == types["ffn_up"] == {"q4_k", "q5_k", "iq4_xs"}
    assert types["ffn_down"] == {"q4_k", "q5_k", "q6_k"}
    attention = [types[f"attn_{part}"] for part in ("q", "k", "v", "output")]
    assert set().union(*attention) == {"q4_k", "q5_k", "q6_k"}
    assert {name for name, kinds in types.items() if kinds == {"f32"}} == {
        *("attn_norm", "post_attention_norm", "output_norm", "attn_q_norm", "attn_k_norm"),
        *("ssm_a", "bias", "ssm_conv1d", "ssm_norm"),
    }


def test_the_file_holds_the_table(synthetic, path):
    file = gg.open(path)
    expected = list(synthetic.tensor_table(synthetic.SMALL))
    got = [(info.name, info.qtype, info.shape) for info in file.tensors.values()]
    assert got == [(t.name, t.qtype, t.shape) for t in expected]
    assert [info.nbytes for info in file.tensors.values()] == list(map(synthetic.nbytes, expected))
    assert path.stat().st_size < 100e6


def test_it_loads_and_says_something_finite(synthetic, path):
    model, tokenizer = gg.load(path)
    vocabulary = synthetic.SMALL.vocabulary
    assert [layer.is_linear for layer in model.layers] == [True, True, True, False]
    text = "The capital of France is Paris."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("!$")) == 1
    assert tokenizer.eos_token_ids == {vocabulary - synthetic.EXTRA, vocabulary - 274}
    logits = model(mx.array([ids]))[0].astype(mx.float32)
    assert logits.shape == (len(ids), vocabulary)
    assert mx.isfinite(logits).all().item()
    # Neither flat nor certain: what follows would cost other than it does with real weights.
    assert 0.1 < logits.std().item() < 30


def test_measurements_are_complete(path, tmp_path):
    output = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPT), str(path), "--measure", "--tokens", "2"]
    result = subprocess.run(
        [*command, "--json", str(output)], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(output.read_text())
    assert report["file_bytes"] == path.stat().st_size
    assert {run["backend"] for run in report["runs"]} >= {"cpu"}
    for run in report["runs"]:
        assert run["decoded_tokens"] == 2
        assert run["decode_tokens_per_s"] > 0
        assert 0 < run["open_s"] < run["first_token_s"]
        assert run["first_token_s"] == pytest.approx(run["load_s"] + run["prompt_s"])
        assert run["loaded"]["peak_rss"] <= run["done"]["peak_rss"]
        assert f"{run['decode_tokens_per_s']:.2f}" in result.stdout
