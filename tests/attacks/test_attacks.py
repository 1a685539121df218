"""Every malformed file is refused by the error of its kind, and nothing else happens."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gguf_bytes import STRING, entry, gguf, string
from malformed import FOUR, attacks, f32, sound

import mlx_gguf as gg

ATTACKS = attacks()
SOUND = sound()


def write(folder, data):
    path = folder / "file.gguf"
    path.write_bytes(data)
    return path


def open_fully(path):
    """Open a file and use everything in it."""
    f = gg.open(path)
    for key in f.metadata:
        f.metadata[key]
    for name, info in f.tensors.items():
        assert f[name].nbytes == info.nbytes
    return f


@pytest.mark.parametrize("name", ATTACKS)
def test_refused_by_type(name, tmp_path):
    data, error = ATTACKS[name]
    with pytest.raises(gg.GGUFError) as caught:
        gg.open(write(tmp_path, data))
    assert type(caught.value).__name__ == error
    assert str(caught.value).startswith("[open] Expected ")
    assert "file.gguf" in str(caught.value)


ALL = """
import mlx_gguf as gg, pathlib, sys

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM"))

before = peak()
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    for copy in (False, True):
        try:
            gg.open(path, copy=copy)
            sys.exit(f"{path} opened")
        except gg.GGUFError:
            pass
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux only")
def test_refused_without_memory(tmp_path):
    for name, (data, _) in ATTACKS.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", ALL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 << 10


@pytest.mark.parametrize("name", sorted(SOUND.keys() - {"split"}))
def test_sound_files_open(name, tmp_path):
    open_fully(write(tmp_path, SOUND[name]))


@pytest.mark.parametrize("name", SOUND)
def test_truncation_at_every_byte(name, tmp_path):
    path = write(tmp_path, SOUND[name])
    for n in reversed(range(len(SOUND[name]))):
        os.truncate(path, n)
        with pytest.raises(gg.TruncatedError):
            gg.open(path)


def test_truncated_data_names_tensor_and_sizes(tmp_path):
    data = gguf([], [f32("blk.0.w")], FOUR)
    with pytest.raises(gg.TruncatedError, match=rf"'blk\.0\.w' of 16 bytes .*{len(data) - 1} "):
        gg.open(write(tmp_path, data[:-1]))


@pytest.mark.parametrize("name", SOUND)
def test_any_byte_changed_opens_or_is_refused(name, tmp_path):
    path = write(tmp_path, SOUND[name])
    rng = random.Random(name)
    with open(path, "r+b", buffering=0) as out:
        for at, byte in enumerate(SOUND[name]):
            for value in (0, 1, 0x7F, 0xFF, rng.randrange(256), byte):  # the last one restores it
                os.pwrite(out.fileno(), bytes([value]), at)
                try:
                    open_fully(path)
                except (gg.GGUFError, FileNotFoundError):  # keys can ask for a shard
                    continue


def test_whatever_fuzzing_has_found_opens_or_is_refused(tmp_path):
    path = tmp_path / "file.gguf"
    with zipfile.ZipFile(Path(__file__).parent / "corpus.zip") as corpus:
        assert len(corpus.namelist()) > 100
        for name in corpus.namelist():
            path.write_bytes(corpus.read(name))
            try:
                open_fully(path)
            except (gg.GGUFError, FileNotFoundError):
                continue


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("zip", "a zip archive"),
        ("safetensors", "a safetensors file"),
        ("lfs-pointer", "a Git LFS pointer"),
        ("html", "HTML"),
        ("magic-backwards", "'FUGG'"),
        ("v1", "version 1"),
        ("v99", "version 99"),
        ("v3-swapped", "big-endian data of version 3"),
        ("type-99", "type id 99"),
        ("duplicate-key", "'k' twice"),
        ("overlap-by-4-bytes", "'v' of 36 bytes .*'w'"),
        ("q4_k-of-640", "640"),
        ("alignment-24", "24"),
    ],
)
def test_error_names_what_was_found(name, found, tmp_path):
    with pytest.raises(gg.GGUFError, match=f"Received .*{found}"):
        gg.open(write(tmp_path, ATTACKS[name][0]))


def test_hostile_names_are_printable_and_short(tmp_path):
    name = "\x1b[2J\n" + "x" * 10_000
    with pytest.raises(gg.TruncatedError) as caught:
        gg.open(write(tmp_path, gguf([], [f32(name, 2**20)], FOUR)))
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000


def test_message_of_file_with_odd_bytes_in_name(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.gguf"
    try:
        with open(path, "wb") as out:
            out.write(b"PK\x03\x04")
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    with pytest.raises(gg.NotGGUFError, match="zip"):
        gg.open(os.fsdecode(path))


def test_empty_file(tmp_path):
    with pytest.raises(gg.TruncatedError, match="an empty file"):
        gg.open(write(tmp_path, b""))


def test_directory(tmp_path):
    with pytest.raises(gg.NotGGUFError, match="a directory"):
        gg.open(tmp_path)


def test_fifo_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(gg.NotGGUFError, match="a FIFO"):
        gg.open(tmp_path / "pipe.gguf")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
@pytest.mark.parametrize("copy", [False, True])
def test_device(device, copy):
    with pytest.raises(gg.NotGGUFError, match="a character device"):
        gg.open(device, copy=copy)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        gg.open(tmp_path / "none.gguf")
    assert caught.value.filename == str(tmp_path / "none.gguf")


def test_null_byte_in_path(tmp_path):
    write(tmp_path, SOUND["metadata"])
    with pytest.raises(OSError, match="Invalid argument"):
        gg.open(str(tmp_path / "file.gguf") + "\0.txt")


def test_files_are_closed(tmp_path):
    path = write(tmp_path, SOUND["metadata"])
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(ATTACKS["duplicate-key"][0])
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [gg.open(path) for _ in range(min(soft, 4096) + 64)]
    for _ in range(min(soft, 4096) + 64):
        with pytest.raises(gg.MalformedError):
            gg.open(bad)
    assert len(held[-1].metadata) == 8


def test_many_equal_hashes_or_prefixes_stay_linear(tmp_path):
    prefix = "a" * 200
    entries = [entry(f"{prefix}{i}", STRING, string("v")) for i in range(20_000)]
    f = gg.open(write(tmp_path, gguf(entries)))
    assert len(f.metadata) == 20_000
    assert f.metadata[f"{prefix}19999"] == "v"
