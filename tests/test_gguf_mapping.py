"""Arrays lie on the mapped file, outlive everything else, and never write to it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFWriter

import mlx_gguf as gg
from attacks import gguf_bytes as gb
from mlx_gguf import _ext

ON_CPU = not (mx.metal.is_available() or mx.cuda.is_available())
MIB = 1 << 20


def sparse(path, kind, dims, nbytes, tail=b""):
    """A file that takes no disk: tensor "pad" of 0xff, then "w" of zeros that ends in `tail`."""
    rows = [gb.tensor("pad", [32], 24, 0), gb.tensor("w", dims, kind, 32)]
    head = gb.gguf([], rows, b"\xff" * 32)
    with open(path, "wb") as out:
        out.write(head)
        out.truncate(len(head) + nbytes)
        out.seek(len(head) + nbytes - len(tail))
        out.write(tail)
    return path


def small(path, values):
    path.write_bytes(gb.gguf([], [gb.tensor("w", [len(values)], 24, 0)], bytes(values)))
    return path


# Linux hands ru_maxrss down to child processes; VmHWM is the process's own.
RSS = """
import os, resource, sys
import mlx.core as mx
import mlx_gguf as gg

def peak():
    if os.path.exists("/proc/self/status"):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

mx.eval(mx.contiguous(mx.zeros((4, 4), mx.uint8)[:2]) + 1)
before = peak()
f = gg.open(sys.argv[1], copy=sys.argv[2] == "copy")
w = f["w"]
assert w.nbytes == 512 << 20
part = w[1000:1002]
whole = mx.contiguous(w)
mx.eval(whole, part)
assert part.sum().item() == 0
assert whole[-1].sum().item() == 4096
print(peak() - before, mx.get_active_memory())
"""


@pytest.mark.skipif(not ON_CPU, reason="a device may need a copy")
@pytest.mark.parametrize("mode", ["map", "copy"])
def test_half_gigabyte_adds_no_memory_when_mapped(mode, tmp_path):
    """512 MiB opened, sliced and passed through mx.contiguous, after bytes that are not zero."""
    path = sparse(tmp_path / "big.gguf", 24, [4096, 131072], 512 * MIB, b"\x01" * 4096)
    command = [sys.executable, "-c", RSS, str(path), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, active = map(int, done.stdout.split())
    assert active < MIB
    if mode == "map":
        assert grown < 16 * MIB
    else:  # the measure sees a copy
        assert grown > 500 * MIB


@pytest.mark.parametrize(
    ("kind", "dims", "nbytes"),
    [
        (24, [1 << 16, (1 << 15) + 1], (1 << 31) + (1 << 16)),  # more elements than an int
        (gb.F16, [1 << 15, (1 << 15) + 1], (1 << 31) + (1 << 16)),
        (gb.Q8_0, [1 << 15, 70000], 70000 * 1024 * 34),
    ],
    ids=["i8", "f16", "q8_0"],
)
@pytest.mark.skipif(not ON_CPU, reason="would copy gigabytes")
def test_over_2_31_bytes(kind, dims, nbytes, tmp_path):
    tail = bytes(range(1, 65))
    f = gg.open(sparse(tmp_path / "big.gguf", kind, dims, nbytes, tail))
    w = f["w"]
    assert w.nbytes == f.tensors["w"].nbytes == nbytes > 2**31
    last = mx.contiguous(w[-1]).view(mx.uint8)
    assert np.array(last[-64:]).tobytes() == tail
    assert not np.array(last[:-64]).any()


def test_arrays_outlive_the_file_object(tmp_path):
    f = gg.open(small(tmp_path / "a.gguf", range(100)))
    w = f["w"]
    view = w[10:20]  # not evaluated
    doubled = w + w
    del f, w
    gc.collect()
    assert view.tolist() == list(range(10, 20))
    assert doubled.tolist()[:50] == list(range(0, 100, 2))


@pytest.mark.parametrize("act", ["rename", "unlink", "replace"])
def test_arrays_outlive_the_name(act, tmp_path):
    path = small(tmp_path / "a.gguf", range(100))
    w = gg.open(path)["w"]
    if act == "rename":
        os.rename(path, tmp_path / "b.gguf")
        small(path, [7] * 100)
    elif act == "unlink":
        os.unlink(path)
    else:  # as a careful writer saves
        os.replace(small(tmp_path / "new.gguf", [7] * 100), path)
    gc.collect()
    assert w.tolist() == list(range(100))
    if act != "unlink":
        assert gg.open(path)["w"].tolist() == [7] * 100


def test_saving_over_the_loaded_path(tmp_path):
    path = small(tmp_path / "a.gguf", range(100))
    w = gg.open(path)["w"]
    new = np.array(w)[::-1]
    path.unlink()
    small(path, new.tolist())
    assert w.tolist() == list(range(100))
    assert gg.open(path)["w"].tolist() == new.tolist()


def test_no_op_writes_into_the_file(tmp_path):
    """A donated buffer would fault, as the pages are read-only, or change the file."""
    path = small(tmp_path / "a.gguf", range(100))
    stored = path.read_bytes()
    f = gg.open(path)
    step = mx.compile(lambda x: x * 2 + 1)
    for _ in range(3):
        mx.eval(f["w"] + 1)  # the array has no other owner
        mx.eval(mx.negative(f["w"]), mx.sort(f["w"]), mx.cumsum(f["w"]), step(f["w"]))
        mx.eval(mx.contiguous(f["w"]) + 1, f["w"].reshape(10, 10).T + 1)
        mx.eval(f["w"].view(mx.uint8) + 1, mx.stop_gradient(f["w"]) * 2)
    w = f["w"]
    w[3] = 99
    w += 1
    assert w.tolist()[:5] == [1, 2, 3, 100, 5]
    assert f["w"].tolist() == list(range(100))
    assert path.read_bytes() == stored


@pytest.mark.skipif(not ON_CPU, reason="a device may need a copy")
def test_arrays_of_a_file_share_its_pages(tmp_path):
    path = tmp_path / "a.gguf"
    rows = [gb.tensor("a", [8], gb.F32, 0), gb.tensor("b", [8], gb.F32, 32)]
    path.write_bytes(gb.gguf([], rows, bytes(64)))
    f = gg.open(path)

    def address(x):
        return np.array(x, copy=False).__array_interface__["data"][0]

    assert address(f["b"]) - address(f["a"]) == 32
    assert address(f["a"]) == address(f["a"])


def test_a_file_that_was_shortened_is_refused_at_the_next_access(tmp_path):
    path = small(tmp_path / "a.gguf", range(100))
    f = gg.open(path)
    w = f["w"]
    os.truncate(path, path.stat().st_size - 1)  # within the last page, which stays readable
    with pytest.raises(gg.TruncatedError, match=r"was shortened.*a\.gguf|a\.gguf.*was shortened"):
        f["w"]
    assert w.tolist()[:99] == list(range(99))
    os.unlink(path)  # whatever has the name now is another file
    assert f["w"].tolist()[:99] == list(range(99))
    small(path, [7])
    assert f["w"].tolist()[:99] == list(range(99))


@pytest.mark.skipif(not ON_CPU or sys.platform != "linux", reason="what Linux does")
def test_reading_what_was_cut_off_ends_the_process_unless_copied(tmp_path):
    """As documented: nothing turns the fault into an error."""
    code = (
        "import os, sys, numpy as np, mlx_gguf as gg\n"
        "f = gg.open(sys.argv[1], copy=sys.argv[2] == 'copy')\n"
        "w = f['w']\n"
        "os.truncate(sys.argv[1], 64)\n"
        "print(int(np.array(w).sum()))\n"
    )
    for mode, expected in (("map", -signal.SIGBUS), ("copy", 0)):
        path = small(tmp_path / f"{mode}.gguf", [1] * 20_000)
        done = subprocess.run([sys.executable, "-c", code, str(path), mode], capture_output=True)
        assert done.returncode == expected, mode


def test_a_writer_that_renames_may_save_over_the_file_its_arrays_lie_on(tmp_path):
    """gguf-py's writer, to a name beside the file, from arrays of the file."""
    path = small(tmp_path / "a.gguf", range(100))
    f = gg.open(path)
    writer = GGUFWriter(tmp_path / "new.gguf", "llama")
    writer.add_tensor("w", np.array(f["w"], copy=False)[::-1].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(tmp_path / "new.gguf", path)
    assert f["w"].tolist() == list(range(100))
    assert gg.open(path)["w"].tolist() == list(range(100))[::-1]


def test_pages_given_back_are_read_again(tmp_path):
    path = small(tmp_path / "a.gguf", list(range(256)) * 100)
    f, copied = gg.open(path), gg.open(path, copy=True)
    other = mx.array(np.arange(20_000))
    for w in (f["w"], f["w"][1:], copied["w"], copied["w"][5000:], other):
        mx.eval(w)
        before = np.array(w)
        _ext.release_pages(w)
        assert np.array_equal(w, before)


def test_copy_is_independent_of_the_file(tmp_path):
    path = small(tmp_path / "a.gguf", range(100))
    f = gg.open(path, copy=True)
    with open(path, "r+b") as out:
        out.truncate(10)  # would fault on a mapping
    assert f["w"].tolist() == list(range(100))


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux only")
def test_mapping_goes_with_its_last_array(tmp_path):
    path = small(tmp_path / "unique-name.gguf", range(100))

    def mapped():
        with open("/proc/self/maps") as maps:
            return path.name in maps.read()

    f = gg.open(path)
    w = f["w"]
    del f
    gc.collect()
    assert mapped()
    part = w[:4]
    mx.eval(part)
    del w
    gc.collect()
    assert mapped()
    del part
    gc.collect()
    assert not mapped()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(gg.TruncatedError):
        gg.open(path)
    assert not mapped()
