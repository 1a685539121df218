"""Perplexity and divergence against mlx-lm's perplexity and float64 arithmetic, on models that
mlx-lm's own classes run with weights decoded by gguf-py."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import product

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from mlx.utils import tree_unflatten
from mlx_lm.perplexity import eval_ppl

import mlx_gguf as gg
from blocks import dequantize64
from cli_support import run
from mlx_gguf import evaluate as module
from mlx_gguf.cli import main
from mlx_gguf.evaluate import evaluate, windows
from mlx_gguf.nn import QuantEmbedding
from reference import hybrid, models

RNG = np.random.default_rng(77)
IDS = RNG.integers(0, 300, 100).tolist()
TEXT = "the reader opens the file and maps the tensors into memory. " * 4
MODELS = {"llama": models, "gemma3": models, "qwen35": hybrid}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Each model's file, and under its name and "-twin" one with other types in every layer."""
    folder = tmp_path_factory.mktemp("evaluate")
    found = {}
    for name, source in MODELS.items():
        found[name] = folder / f"{name}.gguf"
        source.write_model(name, found[name])
        found[f"{name}-twin"] = folder / f"{name}-twin.gguf"
        source.write_model(name, found[f"{name}-twin"], replace=requantised(source, name))
    return found


def requantised(source, name):
    out = {}
    for key, (qtype, packed) in source.tensors(name).items():
        if "ffn_down" in key or "attn_output" in key:
            weights = dequantize64(packed, qtype).astype(np.float32)
            out[key] = "q4_0", quantize(weights, GGMLQuantizationType.Q4_0)
    return out


@cache
def plain(path):
    """The model of a file in mlx-lm's own classes, decoded by gguf-py."""
    model, _ = gg.load(path, dtype=mx.float32)
    layers = []
    for name, layer in model.named_modules():
        if "ggml_type" in layer:
            weight = layer.weight.astype(mx.float32)
            if layer.weight.dtype == mx.uint8:
                decoded = dequantize64(np.array(layer.weight), layer.qtype)
                weight = mx.array(decoded.astype(np.float32))
            embedding = isinstance(layer, QuantEmbedding)
            new = nn.Embedding(1, 1) if embedding else nn.Linear(1, 1, bias=False)
            new.weight = weight
            if "bias" in layer:
                new.bias = layer.bias
            layers.append((name, new))
    assert layers
    model.update_modules(tree_unflatten(layers))
    assert not any("ggml_type" in m for m in model.modules())
    return model


def log_softmax64(model, ids):
    logits = np.array(model(mx.array([ids]))[0].astype(mx.float32)).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


# Windows


@pytest.mark.parametrize(("bos", "context"), list(product([None, 7], [2, 3, 8, 40])))
def test_windows_score_every_token_once(bos, context):
    head = [] if bos is None else [bos]
    body = context - len(head)
    for n, stride in product([2, 3, 7, 8, 9, 31], range(1, body + 1)):
        text = list(range(100, 100 + n))
        if stride == body == 1 and bos is None:
            continue
        found = windows(text, context=context, stride=stride, bos=bos)
        scored = [token for w in found for token in w.ids[w.first :]]
        assert scored == sorted(set(scored))
        missing = set(text) - set(scored)
        if bos is not None:
            assert not missing
        elif stride < body:
            assert missing == {100}
        else:
            assert missing == set(text[::body])
        for w in found:
            assert 2 <= len(w.ids) <= context
            assert w.first >= 1
            assert list(w.ids[: len(head)]) == head
            start = w.ids[len(head)]
            assert list(w.ids[len(head) :]) == list(range(start, start + len(w.ids) - len(head)))
            assert (start - 100) % stride == 0


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([1], {}, r"^\[eval\] .* Received 1 token\.$"),
        ([], {"bos": 1}, r"^\[eval\] .* Received 0 tokens\.$"),
        ([1, 2], {"context": 1}, r"^\[eval\] Expected a context of at least 2 .* Received 1\.$"),
        ([1, 2], {"context": 8, "stride": 8, "bos": 0}, r"stride of 1 to 7 .* Received 8\.$"),
        ([1, 2], {"stride": 0}, r"stride of 1 to 512 .* Received 0\.$"),
    ],
)
def test_windows_refuse(ids, options, message):
    with pytest.raises(ValueError, match=message):
        windows(ids, **options)


# Perplexity


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_equals_mlx_lm_on_decoded_weights(name, paths, capsys):
    data = mx.array(IDS[:96]).reshape(4, 24)
    expected, error = eval_ppl(plain(paths[name]), data, batch_size=3)
    ours, _ = gg.load(paths[name], dtype=mx.float32)
    got = evaluate(ours, windows(IDS[:96], context=24))
    assert (got.tokens, got.windows, got.comparison) == (4 * 23, 4, None)
    assert got.perplexity == pytest.approx(expected, rel=1e-4)
    assert got.perplexity_error == pytest.approx(error, rel=1e-4)
    assert got.perplexity == pytest.approx(math.exp(got.loss))


@pytest.mark.parametrize("name", MODELS)
def test_overlapping_windows_with_a_bos_equal_float64(name, paths):
    parts = windows(IDS, context=32, stride=20, bos=3)
    model, losses = plain(paths[name]), []
    for window in parts:
        log_p = log_softmax64(model, window.ids)
        losses += [-log_p[i - 1, window.ids[i]] for i in range(window.first, len(window.ids))]
    assert len(losses) == len(IDS)
    got = evaluate(gg.load(paths[name], dtype=mx.float32)[0], parts)
    assert got.tokens == len(IDS)
    assert got.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert got.loss_error == pytest.approx(np.std(losses, ddof=1) / len(losses) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_bound_the_logits_and_change_nothing(name, paths, monkeypatch):
    model, _ = gg.load(paths[name], dtype=mx.float32)
    parts = windows(IDS, context=40, stride=30)
    whole = evaluate(model, parts)
    sizes = []

    def recording(ids, cache=None):
        sizes.append(ids.shape[1])
        return model(ids, cache=cache)

    recording.layers = model.layers
    if hasattr(model, "make_cache"):
        recording.make_cache = model.make_cache
    monkeypatch.setattr(module, "_LOGITS", 7 * models.SIZE + 5)
    chunked = evaluate(recording, parts)
    assert max(sizes) == 7
    assert chunked.loss == pytest.approx(whole.loss, rel=1e-6)
    assert chunked.loss_error == pytest.approx(whole.loss_error, rel=1e-5)


def test_a_single_token_has_no_standard_error(paths):
    got = evaluate(gg.load(paths["llama"])[0], windows([5, 6]))
    assert got.tokens == 1
    assert math.isnan(got.loss_error)


# Divergence


@pytest.mark.parametrize("name", MODELS)
def test_a_model_does_not_diverge_from_itself(name, paths):
    parts = windows(IDS, context=40)
    model, other = (gg.load(paths[name])[0] for _ in range(2))
    got = evaluate(model, parts, reference=other)
    assert got.comparison.kl == got.comparison.kl_error == 0
    assert (got.comparison.agreement, got.comparison.agreement_error) == (1, 0)
    assert got.comparison.perplexity == got.perplexity


@pytest.mark.parametrize("name", MODELS)
def test_divergence_from_a_twin_equals_float64(name, paths):
    parts = windows(IDS, context=40, bos=1)
    model, reference = plain(paths[f"{name}-twin"]), plain(paths[name])
    kl, agree, losses = [], [], []
    for window in parts:
        q, p = (log_softmax64(m, window.ids)[window.first - 1 : -1] for m in (model, reference))
        kl += (np.exp(p) * (p - q)).sum(axis=-1).tolist()
        agree += (p.argmax(axis=-1) == q.argmax(axis=-1)).tolist()
        losses += (-p[np.arange(len(p)), window.ids[window.first :]]).tolist()
    assert np.mean(kl) > 1e-3
    assert 0 < np.mean(agree) < 1

    twin, original = (gg.load(paths[n], dtype=mx.float32)[0] for n in (f"{name}-twin", name))
    got = evaluate(twin, parts, reference=original).comparison
    root = len(kl) ** 0.5
    assert got.kl == pytest.approx(np.mean(kl), rel=1e-4)
    assert got.kl_error == pytest.approx(np.std(kl, ddof=1) / root, rel=1e-4)
    assert got.agreement == pytest.approx(np.mean(agree))
    assert got.agreement_error == pytest.approx(np.std(agree, ddof=1) / root)
    assert got.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


def test_what_the_reference_excludes_counts_for_nothing():
    p = mx.log(mx.array([[0.5, 0.5, 0.0, 0.0]]))
    q = mx.log(mx.array([[0.25, 0.25, 0.5, 0.0]]))
    assert module._divergence(p, q).item() == pytest.approx(math.log(2), rel=1e-6)


def test_a_reference_of_another_vocabulary_is_refused(paths):
    model, _ = gg.load(paths["llama"])

    def short(ids, cache=None):
        return model(ids, cache=cache)[..., :100]

    with pytest.raises(ValueError, match=r"^\[eval\] .* 320 tokens\. Received 100\.$"):
        evaluate(model, windows(IDS), reference=short)


# The command


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_command_measures_as_the_function_does(name, paths, text, capsys):
    args = ["--reference", str(paths[name]), "--context", "32", "--stride", "20"]
    assert main(["eval", str(paths[f"{name}-twin"]), "--text", text, *args, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    model, tokenizer = gg.load(paths[f"{name}-twin"])
    bos = None if name == "qwen35" else tokenizer.bos_token_id
    assert report["bos"] == bos
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = windows(ids, context=32, stride=20, bos=bos)
    expected = evaluate(model, parts, reference=gg.load(paths[name])[0])
    assert report["tokens"] == len(ids) - (bos is None)
    assert report["perplexity"] == expected.perplexity
    assert report["comparison"]["kl"] == expected.comparison.kl > 0

    assert main(["eval", str(paths[f"{name}-twin"]), "--text", text, *args]) == 0
    out = capsys.readouterr().out
    assert f"{expected.perplexity:.4f} +- {expected.perplexity_error:.4f}" in out
    assert f"{expected.comparison.kl:.6f} +- {expected.comparison.kl_error:.6f} nats" in out
    assert "windows of 32, stride 20, with" in out


def test_command_reads_a_pipe_and_is_silent_beside_its_result(paths):
    args = ("eval", str(paths["llama"]), "--text", "-", "--max-windows", "1", "--context", "16")
    result = run(*args, input=TEXT)
    assert (result.returncode, result.stderr) == (0, "")
    assert "tokens scored  15 in 1 windows of 16, stride 15, with BOS" in result.stdout


def test_json_has_no_nan(paths, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("a")
    assert main(["eval", str(paths["llama"]), "--text", str(tmp_path / "short.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss_error"] is None


def test_command_refuses_in_one_line(paths, text, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    model = str(paths["llama"])
    for args, part in (
        (["--text", str(tmp_path / "empty.txt")], "Received 0 tokens."),
        (["--text", str(tmp_path / "latin.txt")], "latin.txt"),
        (["--text", str(tmp_path / "nowhere.txt")], "nowhere.txt"),
        (["--text", text, "--stride", "9999"], "Received 9999."),
        (["--text", text, "--reference", str(paths["gemma3"])], "gemma3.gguf"),
    ):
        assert main(["eval", model, *args]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("mlx-gguf: error: [")
        assert err.count("\n") == 1
        assert part in err
