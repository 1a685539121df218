"""Qwen3.5 and Qwen3-Next files against PyTorch's logits on tiny models, in every layout the files
come in, and what is refused of them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import batch_generate, generate
from mlx_lm.models.cache import make_prompt_cache

import mlx_gguf as gg
from reference import hybrid
from reference.compare import Reference

TORCH = Reference("hybrid.npz")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The file of each model."""
    folder = tmp_path_factory.mktemp("hybrid")
    found = {name: folder / f"{name}.gguf" for name in hybrid.MODELS}
    for name, path in found.items():
        hybrid.write_model(name, path)
    return found


@pytest.mark.parametrize("name", hybrid.MODELS)
def test_logits_and_ids_equal_pytorch(name, paths):
    assert hybrid.fingerprint(name) == TORCH.get(name, "fingerprint")
    prompt, steps, ids = TORCH.errors(name, gg.load(paths[name], dtype=mx.float32)[0])
    assert prompt < 5e-5
    assert steps < 5e-5
    assert ids == TORCH.get(name, "greedy").tolist()


@pytest.mark.parametrize("name", hybrid.MODELS)
@pytest.mark.parametrize(("dtype", "limit"), [(mx.float16, 1.5e-2), (mx.bfloat16, 0.1)])
def test_logits_in_16_bits(name, dtype, limit, paths):
    prompt, steps, _ = TORCH.errors(name, gg.load(paths[name], dtype=dtype)[0])
    assert prompt < limit
    assert steps < limit


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe-r3", "qwen3next"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_no_layer_promotes_activations(name, dtype, paths):
    model, _ = gg.load(paths[name], dtype=dtype)
    h = model.model.embed_tokens(mx.array([[5, 6, 7]]))
    cache = make_prompt_cache(model)
    for layer, c in zip(model.layers, cache, strict=True):
        h = layer(h, mask=None, cache=c)
        assert h.dtype == dtype
        if layer.is_linear:
            window, state = c[0], c[1]
            assert window.dtype == dtype
            assert state.dtype == mx.float32
            assert layer.linear_attn.A_log.dtype == mx.float32


def address(array):
    return np.array(array, copy=False).ctypes.data


@pytest.mark.parametrize("name", ["qwen35", "qwen35-r3", "qwen35moe", "qwen35moe-r3"])
def test_weights_stay_where_the_file_has_them(name, paths):
    """No tensor is decoded, permuted or copied, heads in tiled order and fused experts included."""
    file = gg.open(paths[name])
    model, _ = gg.load(paths[name], dtype=mx.float32)
    layers = [m for m in model.modules() if "ggml_type" in m]
    packed = [m.weight for m in layers if m.weight.dtype == mx.uint8]
    used = {
        n: i
        for n, i in file.tensors.items()
        if not n.startswith(f"blk.{len(model.layers)}.") and i.qtype not in ("f32", "f16", "bf16")
    }
    assert sum(w.nbytes for w in packed) == sum(i.nbytes for i in used.values())
    # Equal bytes at the same place of a page: each load maps the file anew. CUDA has a copy.
    if not mx.cuda.is_available():
        pages = {address(w) % 4096 for w in packed}
        assert {i.offset % 4096 for i in used.values()} <= pages
    assert not any(isinstance(m, (mlx.nn.Linear, mlx.nn.Embedding)) for m in model.modules())


def test_models_cover_the_mixes():
    """Of types, as FORMATS lists them for UD-Q4_K_XL files, early ones and small ones."""
    types: dict[str, set[str]] = {}
    for name in hybrid.MODELS:
        for tensor, (qtype, _) in hybrid.tensors(name).items():
            types.setdefault(tensor.split(".")[-2] if "blk" in tensor else tensor, set()).add(qtype)
    assert types["ssm_alpha"] | types["ssm_beta"] >= {"q4_k", "q8_0", "f16", "f32", "bf16"}
    common = {"q4_k", "q5_k", "q6_k", "iq4_xs", "q8_0", "mxfp4", "iq4_nl", "bf16"}
    assert set().union(*types.values()) >= common
    for role in ("attn_qkv", "attn_gate", "ssm_out", "ffn_down_exps", "ffn_up"):
        assert len(types[role]) > 3


@pytest.mark.parametrize("name", ["qwen35-r3", "qwen35moe"])
def test_batch_equals_solo_runs(name, paths):
    model, tokenizer = gg.load(paths[name], dtype=mx.float32)
    prompts = [[7, 8, 9, 10, 11], [40, 41], [100, 90, 80, 70, 60, 50, 40, 30, 20]]
    together = batch_generate(model, tokenizer, prompts, max_tokens=12).texts
    alone = [generate(model, tokenizer, p, max_tokens=12) for p in prompts]
    assert [text.removeprefix(" ") for text in together] == alone


def test_a_draft_block_is_left_out(paths):
    file = gg.open(paths["qwen35-r3"])
    model, _ = gg.load(paths["qwen35-r3"], dtype=mx.float32)
    assert len(model.layers) == 8
    assert "blk.8.nextn.eh_proj.weight" in file
    names = [name for name, _ in tree_flatten(model.parameters())]
    assert not any("layers.8" in name for name in names)


# Split sets


def shuffled(tensors):
    keys = list(tensors)
    np.random.default_rng(1).shuffle(keys)
    return {key: tensors[key] for key in keys}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A set whose first shard has no tensors, and the others have them in any order."""
    folder = tmp_path_factory.mktemp("split")
    hybrid.write_model(
        "qwen35",
        folder / "m.gguf",
        edit=shuffled,
        alignment=32,  # the writer names another in the first shard only
        split_max_tensors=30,
        small_first_shard=True,
    )
    return sorted(folder.iterdir())


def test_a_split_set_equals_the_whole(shards):
    assert len(shards) == 5
    counts = [0] * len(shards)
    for info in gg.open(shards[2]).tensors.values():
        counts[info.shard] += 1
    assert counts[0] == 0
    prompt, steps, _ = TORCH.errors("qwen35", gg.load(shards[3], dtype=mx.float32)[0])
    assert prompt < 5e-5
    assert steps < 5e-5


def test_a_missing_shard_is_named(shards, tmp_path):
    for shard in shards:
        if "00003-of" not in shard.name:
            (tmp_path / shard.name).hardlink_to(shard)
    with pytest.raises((OSError, gg.GGUFError), match="00003-of-00005"):
        gg.load(tmp_path / shards[0].name)


# Refusals


def refused(tmp_path, name, edit):
    path = tmp_path / "m.gguf"
    hybrid.write_model(name, path, edit=edit)
    with pytest.raises(ValueError, match=r"^\[load\] Expected .* Received ") as error:
        gg.load(path)
    return str(error.value)


def without(*names):
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def renamed(old, new):
    return lambda tensors: {new if k == old else k: v for k, v in tensors.items()}


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("qwen35", without("blk.0.ssm_a"), "layers.0.linear_attn.A_log"),
        ("qwen35moe", without("blk.3.ffn_down_shexp.weight"), "layers.3.mlp.shared_expert.down"),
        ("qwen35", renamed("blk.0.ssm_norm.weight", "blk.0.ssm_odd.weight"), "blk.0.ssm_odd"),
        (
            "qwen35-r3",
            renamed("blk.8.nextn.enorm.weight", "blk.8.nextn.odd.weight"),
            "blk.8.nextn.odd.weight",
        ),
        # A layer's tensors where the layer is of the other kind.
        ("qwen35", renamed("blk.2.attn_k.weight", "blk.2.ssm_out.weight"), "blk.2.ssm_out"),
    ],
    ids=["missing", "missing shared expert", "unused", "unused draft", "wrong kind"],
)
def test_what_does_not_fit_is_named(name, edit, said, tmp_path):
    assert said in refused(tmp_path, name, edit)


def test_a_draft_head_alone_is_refused(tmp_path):
    def draft(tensors):
        return {k: v for k, v in tensors.items() if k.startswith("blk.8.") or "." not in k[:-7]}

    assert "draft head (MTP)" in refused(tmp_path, "qwen35-r3", draft)


def test_a_quantised_norm_is_refused(tmp_path):
    q8 = ("q8_0", np.zeros((1, 272), np.uint8))
    message = refused(tmp_path, "qwen35", lambda t: t | {"blk.1.attn_norm.weight": q8})
    assert "blk.1.attn_norm.weight" in message
    assert "q8_0" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recurrent": (True, False)}, "attention.recurrent_layers"),
        ({"value_heads": 4}, "ssm.time_step_rank"),
        ({"key_heads": 0}, "ssm.group_count"),
        ({"recurrent": None, "interval": 0, "bare_dt": False}, "full_attention_interval"),
        ({"key_heads": 1}, "layers.1.linear_attn.in_proj_qkv"),
    ],
    ids=["flags", "heads", "no heads", "interval", "sizes"],
)
def test_metadata_that_does_not_fit_is_named(change, said, tmp_path, monkeypatch):
    tensors = hybrid.tensors("qwen35-irregular")
    wrong = replace(hybrid.spec("qwen35-irregular"), **change)
    monkeypatch.setattr(hybrid, "spec", lambda _: wrong)
    monkeypatch.setattr(hybrid, "tensors", lambda _: tensors)
    assert said in refused(tmp_path, "qwen35-irregular", lambda t: t)
