"""gg.load against independent implementations: PyTorch's logits on tiny models of every
architecture, and the reference ids of real files."""

from __future__ import annotations

from pathlib import Path

import gguf
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import batch_generate, generate, stream_generate
from mlx_lm.models.cache import make_prompt_cache

import mlx_gguf as gg
from reference import models

LOGITS = np.load(Path(__file__).parent / "reference" / "logits.npz")

PROMPT = "The capital of France is"
GEMMA_TOP = {506: 19.0892, 496: 18.5457, 9079: 18.2712, 886: 18.1106, 3224: 17.7836}
GEMMA_IDS = [
    *(506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488, 3207, 528, 7001, 532),
    *(506, 1855, 7488, 3207, 528, 3879, 236761, 1030, 563, 5628, 528, 506, 6029, 529, 506, 2891),
    *(532, 563, 506, 5279, 529, 506, 4128, 529, 506, 1638, 1463, 236761, 1030, 563, 506, 7488),
    *(3207, 528, 7001, 532, 506, 1855, 7488, 3207, 528, 3879, 236761, 108, 818, 5279, 529, 7001),
]
SMOLLM_TOP = {7042: 17.3713, 260: 14.8886, 4528: 13.245, 2250: 13.0095, 1315: 12.9515}
SMOLLM_IDS = [
    *(7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216),
    *(33, 34, 42, 33, 34, 42, 37, 35, 30, 2, 198, 1),
]


def first_logits(model, tokenizer):
    return np.array(model(mx.array([tokenizer.encode(PROMPT)]))[0, -1].astype(mx.float32))


def greedy_ids(model, tokenizer, count):
    """Decode without stopping, one cached step at a time."""
    cache = make_prompt_cache(model)
    tokens = mx.array([tokenizer.encode(PROMPT)])
    ids = []
    for _ in range(count):
        tokens = mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)
        ids.append(tokens.item())
    return ids


@pytest.fixture(scope="module")
def gemma_model(gemma):
    return gg.load(gemma, dtype=mx.float32)


@pytest.fixture(scope="module")
def smollm_model(smollm2):
    return gg.load(smollm2, dtype=mx.float32)


@pytest.mark.parametrize("name", models.MODELS)
def test_logits_equal_pytorch(name, tmp_path):
    path = tmp_path / f"{name}.gguf"
    models.write_model(name, path)
    model, _ = gg.load(path, dtype=mx.float32)
    cache = make_prompt_cache(model)
    prompt = np.array(model(mx.array(LOGITS[f"{name}/prompt"])[None], cache=cache)[0])
    assert np.abs(prompt - LOGITS[f"{name}/prompt_logits"]).max() < 1e-3
    want = LOGITS[f"{name}/decode_logits"]
    for i, token in enumerate(LOGITS[f"{name}/greedy"].tolist()):
        step = np.array(model(mx.array([[token]]), cache=cache)[0, -1])
        assert np.abs(step - want[i]).max() < 1e-3, f"decode step {i}"


def test_gemma_logits_and_ids(gemma_model):
    logits = first_logits(*gemma_model)
    assert list(np.argsort(-logits)[:5]) == list(GEMMA_TOP)
    np.testing.assert_allclose(logits[list(GEMMA_TOP)], list(GEMMA_TOP.values()), atol=2e-3)
    assert greedy_ids(*gemma_model, 64) == GEMMA_IDS


def test_smollm_logits_and_ids(smollm_model):
    logits = first_logits(*smollm_model)
    assert list(np.argsort(-logits)[:5]) == list(SMOLLM_TOP)
    np.testing.assert_allclose(logits[list(SMOLLM_TOP)], list(SMOLLM_TOP.values()), atol=2e-3)
    assert greedy_ids(*smollm_model, 32) == SMOLLM_IDS


@pytest.mark.parametrize(("fixture", "first"), [("gemma", 506), ("smollm2", 7042)])
def test_first_token_in_bfloat16(fixture, first, request):
    model, tokenizer = gg.load(request.getfixturevalue(fixture), dtype=mx.bfloat16)
    assert int(np.argmax(first_logits(model, tokenizer))) == first
    assert model(mx.array([[1]])).dtype == mx.bfloat16


def test_stops_at_the_end_of_a_turn(smollm_model):
    model, tokenizer = smollm_model
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}], add_generation_prompt=True
    )
    last = list(stream_generate(model, tokenizer, prompt, max_tokens=64))[-1]
    assert last.finish_reason == "stop"
    assert last.token in tokenizer.eos_token_ids


def test_batch_equals_solo_runs(smollm_model):
    model, tokenizer = smollm_model
    prompts = [tokenizer.encode(t) for t in (PROMPT, "Water boils at", "One, two, three, four,")]
    together = batch_generate(model, tokenizer, prompts, max_tokens=12).texts
    # mlx-lm's streaming detokenizer drops the space a text begins with.
    alone = [generate(model, tokenizer, p, max_tokens=12) for p in prompts]
    assert [text.removeprefix(" ") for text in together] == alone


def test_weights_stay_packed(gemma, gemma_model):
    model, _ = gemma_model
    file = gg.open(gemma)
    layer = model.layers[0].self_attn.q_proj
    assert isinstance(layer, gg.nn.QuantLinear)
    assert layer.qtype == file.tensors["blk.0.attn_q.weight"].qtype
    packed = sum(
        p.nbytes for name, p in tree_flatten(model.parameters()) if name.endswith(".weight")
    )
    assert packed == sum(i.nbytes for i in file.tensors.values())
    assert not any(isinstance(m, (mlx.nn.Linear, mlx.nn.Embedding)) for m in model.modules())


# Refusals


def edited(path, arch="qwen2", drop=(), add=(), metadata=()):
    """A tiny model with tensors or metadata changed."""
    name = next(n for n in models.MODELS if models.spec(n).arch == arch)
    source = path.with_suffix(".src.gguf")
    models.write_model(name, source)
    reader = gguf.GGUFReader(source)
    changed = dict(metadata)
    writer = gguf.GGUFWriter(path, changed.pop("general.architecture", arch))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = changed.get(key, field.contents())
        kinds = list(field.types)
        writer.add_key_value(key, value, kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in add:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unchanged_edit_loads(tmp_path):
    gg.load(edited(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"metadata": {"general.architecture": "mamba9"}.items()}, ["mamba9", "m.gguf", "qwen2"]),
        ({"metadata": {"general.architecture": "clip"}.items()}, ["clip", "mmproj"]),
        ({"drop": ["blk.1.ffn_up.weight"]}, ["model.layers.1.mlp.up_proj.weight", "qwen2"]),
        (
            {"add": [("blk.0.extra.weight", np.zeros((4, 4), np.float32))]},
            ["blk.0.extra.weight", "(4, 4)"],
        ),
        (
            {"metadata": {"tokenizer.ggml.pre": "no-such-split"}.items()},
            ["no-such-split"],
        ),
        (
            {"metadata": {"qwen2.feed_forward_length": 32}.items()},
            ["mlp.", "blk.0.ffn"],
        ),
    ],
    ids=["architecture", "mmproj", "missing", "unused", "pre-tokenizer", "shape"],
)
def test_what_does_not_fit_is_named(change, names, tmp_path):
    with pytest.raises(ValueError, match=r"^\[\w+\] Expected .* Received ") as error:
        gg.load(edited(tmp_path / "m.gguf", **change))
    for name in names:
        assert name in str(error.value)


def test_other_dtypes_are_refused(smollm2):
    with pytest.raises(ValueError, match=r"\[load\] Expected dtype .* Received .*int8"):
        gg.load(smollm2, dtype=mx.int8)
