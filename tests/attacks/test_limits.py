"""What a hostile file or path may cost: an error of its type, a tenth of a second, 50 MB."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import gguf
import pytest
from fields import fields
from gguf_bytes import STRING, UINT16, UINT32, entry, scalar, string, tensor
from gguf_bytes import gguf as gguf_file
from malformed import FOUR, attacks, f32

import mlx_gguf as gg
from reference import models
from subprocesses import run

ATTACKS = attacks() | fields()

# Processor time of this process, whose end is a signal that kills it, and address space.
LIMITED = """
import json, pathlib, resource, signal, sys
import mlx_gguf as gg

def size():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmSize")) << 10

folder = pathlib.Path(sys.argv[1])
expected = json.loads((folder / "expected.json").read_text())
try:
    gg.open(folder / "warm-up")
except FileNotFoundError:
    pass
resource.setrlimit(resource.RLIMIT_AS, (size() + (50 << 20),) * 2)
for name, error in expected.items():
    for copy in (False, True):
        print(name, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0.1)
        try:
            f = gg.open(folder / name, copy=copy)
            for key in f.metadata:
                f.metadata[key]
            for tensor in f:
                f[tensor]
            found = None
        except gg.GGUFError as e:
            found = type(e).__name__
            assert str(e).startswith("[open] Expected "), e
        signal.setitimer(signal.ITIMER_PROF, 0)
        assert found == error if error else True, (name, found)
print("done")
"""


def test_there_are_many():
    assert len({data for data, _ in ATTACKS.values()}) == len(ATTACKS) > 120


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux only")
def test_refused_in_a_tenth_of_a_second_and_50_megabytes(tmp_path):
    for name, (data, _) in ATTACKS.items():
        (tmp_path / name).write_bytes(data)
    expected = {name: error for name, (_, error) in ATTACKS.items()}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    assert run(LIMITED, str(tmp_path)).endswith("done\n")


def test_names_and_strings_may_hold_any_byte(tmp_path):
    path = tmp_path / "file.gguf"
    rows = [tensor(b"t\0\xff", [4], 0, 0)]
    path.write_bytes(gguf_file([entry(b"k\0\xfe", STRING, string(b"\0\xfd"))], rows, FOUR))
    f = gg.open(path)
    assert dict(f.metadata) == {"k\0\udcfe": "\0\udcfd"}
    assert f["t\0\udcff"].shape == (4,)
    with pytest.raises(gg.MissingKeyError):
        f["t"]


# Paths


def symlink_loop(folder):
    os.symlink(folder / "b.gguf", folder / "a.gguf")
    os.symlink(folder / "a.gguf", folder / "b.gguf")
    return folder / "a.gguf"


def dangling(folder):
    os.symlink(folder / "nothing", folder / "a.gguf")
    return folder / "a.gguf"


def below_a_file(folder):
    (folder / "a.gguf").write_bytes(b"GGUF")
    return folder / "a.gguf" / "b.gguf"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (symlink_loop, "Too many levels of symbolic links"),
        (dangling, "No such file"),
        (below_a_file, "Not a directory"),
        (lambda folder: folder / ("x" * 300), "File name too long"),
    ],
    ids=["symlink-loop", "dangling", "below-a-file", "long-name"],
)
def test_paths_that_lead_nowhere(make, error, tmp_path):
    path = make(tmp_path)
    with pytest.raises(OSError, match=error) as caught:
        gg.open(path)
    assert caught.value.filename == str(path)


def test_a_socket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # such paths are short
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("a.gguf")
        with pytest.raises((OSError, gg.NotGGUFError)):
            gg.open("a.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_file())
    (tmp_path / "a.gguf").chmod(0)
    with pytest.raises(PermissionError):
        gg.open(tmp_path / "a.gguf")


# Split sets


def shard(path, index, count, total, tensors):
    keys = {"split.no": index, "split.count": count, "split.tensors.count": total}
    entries = [entry(k, UINT16, scalar(UINT16, n)) for k, n in keys.items()]
    rows = [f32(name, 32 * i) for i, name in enumerate(tensors)]
    path.write_bytes(gguf_file(entries, rows, bytes(32 * len(tensors))))
    return path


@pytest.mark.parametrize("other", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_a_shard_that_is_no_file(other, tmp_path):
    first = shard(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2, ["a"])
    other(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(gg.NotGGUFError, match="m-00002-of-00002"):
        gg.open(first)


def test_a_set_that_says_it_has_99999_shards(tmp_path):
    entries = [
        entry(k, UINT32, scalar(UINT32, n))
        for k, n in (("split.no", 0), ("split.count", 99999), ("split.tensors.count", 1))
    ]
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(gguf_file(entries, [f32("a")], FOUR))
    with pytest.raises(FileNotFoundError, match="shard 2 of 99999"):
        gg.open(path)


def test_a_shard_that_is_all_shards(tmp_path):
    """By links, so that each name leads to the first."""
    first = shard(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2, ["a"])
    os.symlink(first, tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(gg.MalformedError, match="shard 1 of 2"):
        gg.open(first)


def split_model(name, folder):
    """A tiny model as a set of three shards."""
    models.write_model(name, folder / "whole.gguf")
    reader = gguf.GGUFReader(folder / "whole.gguf")
    per_shard = -(-len(reader.tensors) // 3)
    writer = gguf.GGUFWriter(folder / "m.gguf", models.spec(name).arch, split_max_tensors=per_shard)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kinds = list(field.types)
            writer.add_key_value(
                key, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None
            )
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "whole.gguf").unlink()
    return sorted(folder.glob("m-*.gguf"))


@pytest.mark.parametrize("other", ["llama-rope-freqs", "llama-tied", "qwen3"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_shard_of_another_model(other, which, tmp_path):
    for name in ("own", "others"):
        (tmp_path / name).mkdir()
    own = split_model("llama", tmp_path / "own")
    others = split_model(other, tmp_path / "others")
    assert len(own) == len(others) == 3
    gg.load(own[0])
    os.replace(others[which], own[which])
    with pytest.raises(ValueError, match=r"^\[\w+\] Expected .* Received "):
        gg.load(own[0])


# Metadata that the loader reads


def rewritten(source, path, key, kind, value):
    reader = gguf.GGUFReader(source)
    arch = models.spec("llama").arch
    writer = gguf.GGUFWriter(path, arch)
    writer.kv_data[0].clear()
    for name, field in reader.fields.items():
        if name.startswith("GGUF."):
            continue
        kinds = list(field.types)
        sub_type = kinds[-1] if len(kinds) > 1 else None
        if name == key:
            writer.add_key_value(name, value, kind, sub_type=gguf.GGUFValueType.INT32)
        else:
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=sub_type)
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


T = gguf.GGUFValueType
VALUES = {
    "zero": (T.UINT32, 0),
    "one": (T.UINT32, 1),
    "minus-one": (T.INT32, -1),
    "2^31": (T.UINT32, 2**31),
    "2^63": (T.UINT64, 2**63),
    "nan": (T.FLOAT32, float("nan")),
    "inf": (T.FLOAT32, float("inf")),
    "half": (T.FLOAT32, 0.5),
    "true": (T.BOOL, True),
    "text": (T.STRING, "\0{{ 1 }}"),
    "list": (T.ARRAY, [1, -1, 2**31 - 1]),
}


@pytest.mark.parametrize("value", VALUES)
def test_any_value_of_any_key_loads_or_is_refused(value, tmp_path):
    source = tmp_path / "source.gguf"
    models.write_model("llama", source)
    kind, given = VALUES[value]
    for key in gg.open(source).metadata:
        path = tmp_path / "m.gguf"
        rewritten(source, path, key, kind, given)
        found = None
        try:
            gg.load(path)
        except Exception as error:
            found = error
        assert found is None or isinstance(found, (ValueError, gg.MissingKeyError)), (key, found)
        assert found is None or str(found).startswith("["), (key, found)


def test_loading_allocates_nothing_by_a_number_of_the_file(tmp_path):
    source = tmp_path / "source.gguf"
    models.write_model("llama", source)
    code = """
import resource, signal, sys
source, path, attacks = sys.argv[1:]
sys.path.insert(0, attacks)
from test_limits import rewritten, T
import mlx_gguf as gg
gg.load(source)
lines = open("/proc/self/status").read().splitlines()
size = next(int(x.split()[1]) for x in lines if x.startswith("VmSize")) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20),) * 2)
for key in gg.open(source).metadata:
    for number in (10**6, 2**31 - 1, 2**40):
        rewritten(source, path, key, T.UINT64, number)
        signal.setitimer(signal.ITIMER_PROF, 5)
        try:
            gg.load(path)
        except (ValueError, gg.MissingKeyError):
            pass
        signal.setitimer(signal.ITIMER_PROF, 0)
print("done")
"""
    paths = [source, tmp_path / "m.gguf", Path(__file__).parent]
    assert run(code, *map(str, paths)).endswith("done\n")
