"""Tensor parallelism: what ranks compute together is what one computes alone."""

from __future__ import annotations

import os

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_flatten

import mlx_gguf as gg
import ranks as processes
from attacks import gguf_bytes as gb
from blocks import TYPES, random_blocks
from reference import hybrid, models, variants

MIB = 1 << 20
pytestmark = pytest.mark.skipif(
    not mx.distributed.is_available("ring"), reason="MLX without its ring backend"
)


class Rank:
    """A group as far as cutting asks."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def quant_linear(qtype, N, K, bias=False):
    raw = mx.array(random_blocks(qtype, N, K, np.random.default_rng(0)))
    return gg.nn.QuantLinear.from_packed(raw, qtype, mx.arange(N) * 1.0 if bias else None)


def values(layer):
    return np.array(gg.dequantize(layer["weight"], layer.qtype))


def close(a, b, tolerance):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


# What a rank gets


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("qtype", TYPES)
def test_shares_are_the_layers_rows_and_columns(qtype, ranks):
    layer = quant_linear(qtype, 12, 1024, bias=True)
    whole = values(layer)
    for sharding, axis in (("all-to-sharded", 0), ("sharded-to-all", 1)):
        shares = [shard_linear(layer, sharding, group=Rank(r, ranks)) for r in range(ranks)]
        assert all(share.qtype == qtype for share in shares)
        assert np.array_equal(np.concatenate(list(map(values, shares)), axis), whole)
        bias = np.concatenate([share["bias"] for share in shares])
        assert np.array_equal(bias, np.tile(np.arange(12.0), 1 if axis == 0 else ranks))
        assert "input_dims=1024, output_dims=12, bias=True" in repr(shares[0])
    assert values(layer).shape == whole.shape  # shard_linear leaves its argument alone


@pytest.mark.parametrize("qtype", ["q4_k", "q8_0", "bf16"])
def test_segments_are_cut_one_by_one(qtype):
    """A fused q, k, v: by number, by position and by fraction."""
    rows, columns = quant_linear(qtype, 16, 256), quant_linear(qtype, 4, 4096)
    for segments, borders in ((2, [0, 0.5, 1]), ([0.5, 0.75], [0, 0.5, 0.75, 1])):
        for layer, sharding in ((rows, "all-to-sharded"), (columns, "sharded-to-all")):
            axis = 0 if layer is rows else 1
            whole = values(layer)
            size = whole.shape[axis]
            positions = [int(b * size) for b in borders]
            for given in (segments, positions[1:-1] if isinstance(segments, list) else segments):
                for r in range(2):
                    share = shard_linear(layer, sharding, segments=given, group=Rank(r, 2))
                    expected = [
                        np.split(part, 2, axis)[r]
                        for part in np.split(whole, positions[1:-1], axis)
                    ]
                    assert np.array_equal(values(share), np.concatenate(expected, axis))


def test_in_place_at_any_depth_and_beside_plain_layers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [quant_linear("q4_k", 8, 256, bias=True), nn.Linear(6, 8)]
            self.experts = gg.nn.QuantSwitchLinear(512, 4, 3, qtype="q4_k")
            self.embed = gg.nn.QuantEmbedding(10, 256, qtype="q6_k")

    block = Block()
    block.parts[1].weight = mx.arange(48.0).reshape(8, 6)
    before = values(block.parts[0])
    only_parts = lambda path, w: max(w.ndim - 2, 0) if path.startswith("parts") else None  # noqa: E731
    shard_inplace(block, only_parts, group=Rank(1, 2))
    assert np.array_equal(values(block.parts[0]), before[4:])
    assert block.parts[0]["bias"].tolist() == [4, 5, 6, 7]
    assert block.parts[1].weight.tolist() == np.arange(24, 48).reshape(4, 6).tolist()
    assert values(block.embed).shape == (10, 256)
    shard_inplace(block.experts, "sharded-to-all", group=Rank(0, 2))
    assert (block.experts.num_experts, block.experts.output_dims) == (3, 4)
    assert block.experts.input_dims == 256
    assert block.experts.bias.shape == (3, 4)


def test_plain_layers_are_sharded_as_before():
    linear = nn.Linear(64, 8)
    for layer in (linear, nn.QuantizedLinear.from_linear(linear)):
        for sharding in ("all-to-sharded", "sharded-to-all"):
            share = shard_linear(layer, sharding, group=mx.distributed.init())
            assert not isinstance(share, gg.distributed._Sharded)
            assert mx.array_equal(share.weight, layer.weight)


@pytest.mark.parametrize(
    ("sharding", "shape", "segments", "found"),
    [
        ("all-to-sharded", (9, 256), 1, "from 0 to 9"),
        ("sharded-to-all", (8, 256), 1, "from 0 to 256"),
        ("sharded-to-all", (8, 768), 1, "from 0 to 768"),
        ("sharded-to-all", (8, 1024), [128], "from 0 to 128"),
        ("all-to-sharded", (8, 256), [8], "from 8 to 8"),
        ("all-to-sharded", (8, 256), [6, 2], "from 6 to 2"),
    ],
)
def test_what_cannot_be_cut_is_an_error(sharding, shape, segments, found):
    with pytest.raises(ValueError, match=rf"\[shard\] Expected .* in whole .* Received .*{found}"):
        shard_linear(quant_linear("q4_k", *shape), sharding, segments=segments, group=Rank(0, 2))


def test_heads_that_cannot_be_shared_are_an_error(tmp_path):
    write_model(hybrid, "qwen35-r3", tmp_path / "m.gguf")
    model, _ = gg.load(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"\[shard\] Expected key heads .* Received 2"):
        model.shard(Rank(0, 4))


def test_a_model_without_shard_is_an_error(tmp_path):
    models.write_model("gemma3", tmp_path / "m.gguf", {})
    with pytest.raises(ValueError, match=r"\[load\] Expected .* shard\. Received gemma3\."):
        gg.load(tmp_path / "m.gguf", group=Rank(0, 2))
    gg.load(tmp_path / "m.gguf", group=Rank(0, 1))


def test_a_share_is_not_trained():
    share = shard_linear(quant_linear("q4_k", 8, 256, True), "all-to-sharded", group=Rank(0, 2))
    assert [name for name, _ in tree_flatten(share.trainable_parameters())] == ["bias"]


# Ranks as processes


two_gpus = pytest.mark.skipif(
    not mx.distributed.is_available("nccl") or mx.device_count(mx.gpu) < 2,
    reason="no two GPUs and MLX with NCCL",
)


@pytest.mark.parametrize(
    ("backend", "ranks"), [("ring", 2), ("ring", 4), pytest.param("nccl", 2, marks=two_gpus)]
)
@pytest.mark.parametrize("task", ["layers", "experts"])
def test_ranks_equal_one(task, backend, ranks, tmp_path):
    expected = processes.one_rank(task, tmp_path)
    for out in processes.run(task, ranks, tmp_path, backend):
        assert out.keys() == expected.keys()
        for name, y in out.items():
            assert close(y, expected[name], 2e-2 if name.endswith("half") else 2e-6), name


COLUMNS = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "ssm_out")


def write_model(source, name, path):
    """A tiny model whose columns four ranks can share: in 32-blocks, rows being short."""
    rng = np.random.default_rng(9)
    replace = {}
    for key, (qtype, packed) in source.tensors(name).items():
        if key.split(".")[-2] in COLUMNS:
            fmt = gg.find_format(qtype)
            K = packed.shape[-1] // fmt.block_bytes * fmt.block_size
            rows = packed.size // packed.shape[-1]
            raw = random_blocks("q8_0", rows, K, rng, size=(0.7 * K**-0.5, 1.4 * K**-0.5))
            replace[key] = ("q8_0", raw.reshape(*packed.shape[:-1], -1))
    source.write_model(name, path, replace)


# With four: fewer key and value heads than ranks, which mlx-lm repeats for Qwen3.5 alone.
TWO = "llama qwen2 qwen3 qwen3moe qwen35 qwen35moe qwen35moe-r3 qwen3next"
FOUR = "qwen3 qwen35moe"


@pytest.mark.parametrize(
    ("backend", "ranks", "names"),
    [
        ("ring", 2, TWO.split()),
        ("ring", 4, FOUR.split()),
        pytest.param("nccl", 2, TWO.split(), marks=two_gpus),
    ],
)
def test_models_by_their_own_shard(backend, ranks, names, tmp_path):
    for name in names:
        source = next(m for m in (models, variants, hybrid) if name in m.MODELS)
        write_model(source, name, tmp_path / f"{name}.gguf")
    expected = processes.one_rank("models", tmp_path)
    assert len(expected) == 2 * len(names)
    for out in processes.run("models", ranks, tmp_path, backend):
        wrong = [name for name, y in out.items() if not close(y, expected[name], 2e-5)]
        assert not wrong


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="Linux only")
def test_a_rank_holds_its_share_alone(tmp_path):
    """Of 64 MiB to be cut by rows and 64 MiB to be cut by columns."""
    N = 16384
    tensors = [gb.tensor("rows.weight", [4096, N // 4], 0, 0)]
    tensors += [gb.tensor("columns.weight", [N // 4, 4096], 0, 64 * MIB)]
    head = gb.gguf([], tensors, bytes(32))
    with open(tmp_path / "big.gguf", "wb") as out:
        out.write(head)
        out.truncate(len(head) + 128 * MIB)
    for shares in processes.run("memory", 4, tmp_path):
        assert 15 * MIB < shares["mapped"] < 24 * MIB
        assert 15 * MIB < shares["copied"] < 24 * MIB
