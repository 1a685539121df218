"""What the GGUF reader says of a file, against gguf-py and against files spelled out by hand."""

from __future__ import annotations

import math
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

import mlx_gguf as gg
from attacks import gguf_bytes as gb
from blocks import TYPES, random_blocks

PLAIN = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def write(folder, data, name="file.gguf"):
    path = folder / name
    path.write_bytes(data)
    return path


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw(array):
    """The bytes of an array, whatever its dtype."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat.view(mx.uint8)) if flat.size else np.zeros(0, np.uint8)


# Metadata


@pytest.mark.parametrize("version", [2, 3])
def test_every_scalar_type_at_its_limits(version, tmp_path):
    ends = {
        gb.UINT8: (0, 2**8 - 1),
        gb.INT8: (-(2**7), 2**7 - 1),
        gb.UINT16: (0, 2**16 - 1),
        gb.INT16: (-(2**15), 2**15 - 1),
        gb.UINT32: (0, 2**32 - 1),
        gb.INT32: (-(2**31), 2**31 - 1),
        gb.UINT64: (0, 2**64 - 1),
        gb.INT64: (-(2**63), 2**63 - 1),
        gb.FLOAT32: (-0.0, float(np.finfo(np.float32).max)),
        gb.FLOAT64: (5e-324, math.pi),
        gb.BOOL: (False, True),
        gb.STRING: ("", "zażółć 🦜\0"),
    }
    want = {f"{kind}.{i}": (kind, x) for kind, pair in ends.items() for i, x in enumerate(pair)}
    data = gb.gguf(
        [gb.entry(key, kind, gb.scalar(kind, x)) for key, (kind, x) in want.items()],
        version=version,
    )
    f = gg.open(write(tmp_path, data))
    assert f.version == version
    assert list(f.metadata) == list(want)
    for key, (_, x) in want.items():
        assert repr(f.metadata[key]) == repr(x)


@pytest.mark.parametrize("kind", sorted(gb.CODES))
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_arrays_of_numbers(kind, count, tmp_path):
    code = gb.CODES[kind]
    rng = np.random.default_rng(kind)
    values = rng.integers(0, 2 if code == "?" else 128, count).astype(np.dtype(code))
    data = gb.gguf([gb.entry("a", gb.ARRAY, gb.array(kind, [values.tobytes()], count))])
    f = gg.open(write(tmp_path, data))
    assert f.metadata.length_of("a") == count
    assert f.metadata["a"] == values.tolist()
    assert all(type(x) is type(y) for x, y in zip(f.metadata["a"], values.tolist(), strict=True))


def test_nested_arrays(tmp_path):
    numbers = gb.array(gb.INT8, [b"\x01\xff"], 2)
    words = gb.array(gb.STRING, [gb.string("x"), gb.string("")])
    inner = [gb.array(gb.ARRAY, [numbers, words]), gb.array(gb.ARRAY, []), numbers]
    data = gb.gguf([gb.entry("n", gb.ARRAY, gb.array(gb.ARRAY, inner)), gb.alignment(32)])
    f = gg.open(write(tmp_path, data))
    assert f.metadata["n"] == [[[1, -1], ["x", ""]], [], [1, -1]]
    assert f.metadata.type_of("n") == "array[array]"
    assert f.metadata["general.alignment"] == 32


def test_eight_levels_of_nesting(tmp_path):
    payload, want = gb.array(gb.UINT8, [b"\x07"]), [7]
    for _ in range(7):
        payload, want = gb.array(gb.ARRAY, [payload]), [want]
    f = gg.open(write(tmp_path, gb.gguf([gb.entry("deep", gb.ARRAY, payload)])))
    assert f.metadata["deep"] == want


def test_bytes_that_are_not_utf8_survive(tmp_path):
    odd = b"tok\xff\xfe\xe2\x82"
    data = gb.gguf(
        [
            gb.entry("s", gb.STRING, gb.string(odd)),
            gb.entry("l", gb.ARRAY, gb.array(gb.STRING, [gb.string(odd)])),
            gb.entry(b"key\xff", gb.UINT8, b"\x05"),
        ],
        [gb.tensor(b"\xffw", [1], gb.F32, 0)],
        bytes(4),
    )
    f = gg.open(write(tmp_path, data))
    assert f.metadata["s"].encode("utf-8", "surrogateescape") == odd
    assert f.metadata["l"][0].encode("utf-8", "surrogateescape") == odd
    name = b"key\xff".decode("utf-8", "surrogateescape")
    assert f.metadata[name] == 5
    assert f[b"\xffw".decode("utf-8", "surrogateescape")].shape == (1,)


def test_metadata_is_a_read_only_mapping(tmp_path):
    f = gg.open(write(tmp_path, gb.gguf([gb.entry("k", gb.UINT8, b"\x01")])))
    assert "k" in f.metadata
    assert f.metadata.get("none") is None
    assert dict(f.metadata) == {"k": 1}
    with pytest.raises(TypeError):
        f.metadata["k"] = 2
    with pytest.raises(TypeError):
        f.tensors["k"] = None


def test_architecture(tmp_path):
    data = gb.gguf([gb.entry("general.architecture", gb.STRING, gb.string("llama"))])
    assert gg.open(write(tmp_path, data)).architecture == "llama"
    with pytest.raises(KeyError, match=r"general\.architecture"):
        _ = gg.open(write(tmp_path, gb.gguf(), "none.gguf")).architecture


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A file with 250,000 tokens, scores and merges."""
    path = tmp_path_factory.mktemp("vocabulary") / "file.gguf"
    n = 250_000
    writer = GGUFWriter(path, "llama")
    writer.add_token_list([f"▁token{i}" for i in range(n)])
    writer.add_token_scores([float(-i) for i in range(n)])
    writer.add_token_types([1] * n)
    writer.add_token_merges([f"▁to ken{i}" for i in range(n)])
    finish(writer)
    return path


def test_large_vocabulary_opens_in_well_under_a_second(vocabulary):
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        gg.open(vocabulary)
        best = min(best, time.perf_counter() - start)
    assert best < 0.2


@pytest.mark.skipif(not hasattr(sys, "getallocatedblocks"), reason="CPython only")
def test_large_vocabulary_makes_no_objects_until_asked(vocabulary):
    gg.open(vocabulary)
    before = sys.getallocatedblocks()
    f = gg.open(vocabulary)
    assert f.metadata.length_of("tokenizer.ggml.tokens") == 250_000
    assert f.metadata.type_of("tokenizer.ggml.scores") == "array[float32]"
    assert "250000 long" in repr(f.metadata)
    assert sys.getallocatedblocks() - before < 2_000
    assert f.metadata["tokenizer.ggml.tokens"][-1] == "▁token249999"
    assert f.metadata["tokenizer.ggml.scores"][-1] == -249999.0
    assert f.metadata["tokenizer.ggml.merges"] is f.metadata["tokenizer.ggml.merges"]


# Tensors


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("qtype", TYPES)
def test_supported_type_round_trips_through_gguf_py(qtype, copy, tmp_path):
    path = tmp_path / "file.gguf"
    rng = np.random.default_rng(7)
    K = 3 * 256
    writer = GGUFWriter(path, "llama")
    stored = {}
    for name, lead in {"one": (), "two": (5,), "three": (3, 2), "four": (2, 1, 3)}.items():
        rows = random_blocks(qtype, math.prod(lead), K, rng)
        stored[name] = rows.reshape(*lead, -1)
        writer.add_tensor(name, stored[name], raw_dtype=GGMLQuantizationType[qtype.upper()])
    finish(writer)

    f = gg.open(path, copy=copy)
    theirs = {t.name: t for t in GGUFReader(path).tensors}
    assert list(f) == list(theirs) == list(stored)
    for name, want in stored.items():
        info, array = f.tensors[name], f[name]
        assert info.qtype == qtype
        assert info.shape == (*want.shape[:-1], K) == tuple(theirs[name].shape[::-1].tolist())
        assert info.nbytes == want.nbytes == theirs[name].n_bytes == array.nbytes
        assert info.offset == theirs[name].data_offset
        assert array.dtype == PLAIN.get(qtype, mx.uint8)
        assert array.shape == (info.shape if qtype in PLAIN else want.shape)
        assert np.array_equal(raw(array), want.reshape(-1))


@pytest.mark.parametrize("dtype", ["f64", "i8", "i16", "i32", "i64"])
def test_other_plain_types_become_arrays(dtype, tmp_path):
    path = tmp_path / "file.gguf"
    numpy_type = {"f": "float", "i": "int"}[dtype[0]] + dtype[1:]
    want = np.arange(-6, 6).astype(numpy_type).reshape(3, 4)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", want)
    finish(writer)
    f = gg.open(path)
    assert f.tensors["w"].qtype == dtype
    assert np.array_equal(np.array(f["w"]), want)


@pytest.mark.parametrize("qtype", ["iq2_xxs", "iq1_m", "tq1_0", "q8_k"])
def test_type_without_kernels_is_refused_at_use_not_at_open(qtype, tmp_path):
    kind = GGMLQuantizationType[qtype.upper()]
    nbytes = {"iq2_xxs": 66, "iq1_m": 56, "tq1_0": 54, "q8_k": 292}[qtype]
    rows = [gb.tensor("odd", [256, 1], kind, 0), gb.tensor("w", [2], gb.F32, 320)]
    f = gg.open(write(tmp_path, gb.gguf([], rows, bytes(328))))
    assert f.tensors["odd"] == gg.TensorInfo(
        "odd", qtype, (1, 256), nbytes, f.tensors["w"].offset - 320, 0
    )
    assert f["w"].shape == (2,)
    with pytest.raises(gg.UnsupportedTypeError, match=f"'odd'.*{qtype}"):
        f["odd"]


@pytest.mark.parametrize("align", [1, 2, 8, 64, 4096, 2**20])
def test_alignment(align, tmp_path):
    """Tensors at any address; below a type's own alignment the data is copied."""
    rng = np.random.default_rng(align)
    contents = {
        "first": (gb.F32, [5], rng.standard_normal(5).astype("<f4").view(np.uint8)),
        "half": (gb.F16, [3], rng.standard_normal(3).astype("<f2").view(np.uint8)),
        "q4_k": (gb.Q4_K, [256, 2], random_blocks("q4_k", 2, 256, rng)),
        "long": (27, [3], rng.integers(-(2**60), 2**60, 3).view(np.uint8)),
        "last": (gb.F32, [2, 2], rng.standard_normal(4).astype("<f4").view(np.uint8)),
    }
    # A name of odd length moves the data of unaligned files to odd addresses.
    for shift in range(min(align, 2)) if align > 1 else range(16):
        rows, data = [gb.tensor("x" * (shift + 1), [1], 24, 0)], b"\x2a"
        for name, (kind, dims, stored) in contents.items():
            data += bytes(-len(data) % align)
            rows.append(gb.tensor(name, dims, kind, len(data)))
            data += stored.tobytes()
        f = gg.open(
            write(
                tmp_path, gb.gguf([gb.alignment(align)], rows, data, align=align), f"{shift}.gguf"
            )
        )
        for name, (_, _, stored) in contents.items():
            array = f[name]
            assert np.array_equal(raw(array), stored.reshape(-1))
            # Use by an op, too: unaligned loads would show under a sanitizer.
            mx.eval(array + array)


@pytest.mark.parametrize("dims", [[0], [0, 3], [32, 0], [32, 0, 2], [0, 0, 0, 0]])
@pytest.mark.parametrize("kind", [gb.F32, gb.Q8_0])
def test_dim_of_zero_is_an_empty_array(dims, kind, tmp_path):
    f = gg.open(write(tmp_path, gb.gguf([], [gb.tensor("w", dims, kind, 0)], bytes(32))))
    shape = tuple(reversed(dims))
    assert f.tensors["w"].shape == shape
    assert f.tensors["w"].nbytes == 0
    array = f["w"]
    assert array.shape == (shape if kind == gb.F32 else (*shape[:-1], shape[-1] // 32 * 34))
    mx.eval(array + array)


def test_missing_tensor_names_tensor_file_and_close_matches(tmp_path):
    rows = [gb.tensor(f"blk.{i}.ffn_up.weight", [1], gb.F32, 32 * i) for i in range(3)]
    path = write(tmp_path, gb.gguf([], rows, bytes(68)))
    f = gg.open(path)
    with pytest.raises(KeyError) as caught:
        f["blk.1.ffn_up.weigth"]
    message = str(caught.value)
    assert "'blk.1.ffn_up.weigth'" in message
    assert str(path) in message
    assert "blk.1.ffn_up.weight" in message.split("Close:")[1]
    assert "blk.1.ffn_up.weigth" not in f
    assert "blk.1.ffn_up.weight" in f
    assert len(f) == 3
    assert "3 tensors" in repr(f)


# Split sets


@pytest.fixture
def shards(tmp_path):
    """Five tensors in three shards, and what they hold."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "set")
    want = {f"t{i}": np.full((2, 32), i, np.float32) for i in range(5)}
    for name, array in want.items():
        writer.add_tensor(name, array)
    finish(writer)
    return sorted(tmp_path.glob("model-*.gguf")), want


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_shard_opens_the_set(opened, shards):
    paths, want = shards
    assert [p.name for p in paths] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    f = gg.open(paths[opened])
    assert f.paths == tuple(map(str, paths))
    assert f.path == str(paths[opened])
    assert f.metadata["general.name"] == "set"
    assert [info.shard for info in f.tensors.values()] == [0, 0, 1, 1, 2]
    assert list(f) == list(want)
    for name, array in want.items():
        assert np.array_equal(np.array(f[name]), array)


def test_missing_shard_is_named(shards):
    paths, _ = shards
    paths[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"shard 2 of 3.*model-00002-of-00003"):
        gg.open(paths[0])


def split_file(name, index, count, total, tensors=("w",), kind=gb.UINT16):
    keys = {"split.no": index, "split.count": count}
    entries = [gb.entry(k, kind, gb.scalar(kind, n)) for k, n in keys.items()]
    entries.append(gb.entry("split.tensors.count", gb.INT32, gb.scalar(gb.INT32, total)))
    rows = [gb.tensor(t, [8], gb.F32, 32 * i) for i, t in enumerate(tensors)]
    return name, gb.gguf(entries, rows, bytes(32 * len(tensors)))


A, B = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([split_file(A, 0, 2, 2, ["a"]), split_file(B, 0, 2, 2, ["b"])], "shard 1 of 2"),
        ([split_file(A, 0, 2, 2, ["a"]), split_file(B, 1, 3, 2, ["b"])], "shard 2 of 3"),
        ([split_file(A, 0, 2, 2, ["a"]), split_file(B, 1, 2, 9, ["b"])], "9 tensors"),
        ([split_file(A, 0, 2, 2, ["a"]), (B, gb.gguf())], "without split metadata"),
        ([split_file(A, 0, 2, 3, ["a"]), split_file(B, 1, 2, 3, ["b"])], "2 in all"),
        ([split_file(A, 0, 2, 2, ["w"]), split_file(B, 1, 2, 2, ["w"])], "'w' in more"),
        ([split_file(A, 1, 2, 1)], "another name"),
        ([split_file("m.gguf", 0, 2, 1)], "another name"),
        ([split_file(A, 2, 2, 1)], "2 and 2"),
        ([split_file(A, -1, 2, 1, kind=gb.INT16)], "int16"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_shards_that_do_not_belong_together(files, found, tmp_path):
    paths = [write(tmp_path, data, name) for name, data in files]
    with pytest.raises(gg.MalformedError, match=f"Received .*{found}"):
        gg.open(paths[0])


def test_shard_integers_of_any_type(tmp_path):
    for name, data in (
        split_file(A, 0, 2, 2, ["a"], gb.INT64),
        split_file(B, 1, 2, 2, ["b"], gb.UINT8),
    ):
        write(tmp_path, data, name)
    assert list(gg.open(tmp_path / B)) == ["a", "b"]


def test_many_threads_share_a_file(shards):
    paths, want = shards
    f = gg.open(paths[0])
    failures = []

    def work():
        try:
            for _ in range(20):
                other = gg.open(paths[2])
                assert other.metadata["general.name"] == f.metadata["general.name"]
                for name, array in want.items():
                    assert np.array_equal(np.array(f[name]), array)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_writer_value_types_agree_with_ours():
    """gguf-py's numbers are the ones the hand-made files use."""
    ours = (gb.UINT8, gb.INT8, gb.UINT32, gb.BOOL, gb.STRING, gb.ARRAY, gb.UINT64, gb.FLOAT64)
    names = ("UINT8", "INT8", "UINT32", "BOOL", "STRING", "ARRAY", "UINT64", "FLOAT64")
    assert ours == tuple(GGUFValueType[n].value for n in names)
