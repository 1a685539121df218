"""Malformed GGUF files, each with the error that must meet it.

Run `python malformed.py DIR` to write them all, and sound files to mutate, into a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    FLOAT32,
    INT16,
    INT32,
    Q4_0,
    Q4_K,
    Q8_0,
    STRING,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    alignment,
    array,
    entry,
    gguf,
    scalar,
    string,
    tensor,
    u32,
    u64,
)

HUGE = 2**62
FOUR = bytes(range(1, 17))  # data of four f32


def nested(depth: int) -> bytes:
    """Payload of an array nested `depth` deep around one uint8."""
    return (u32(ARRAY) + u64(1)) * (depth - 1) + array(UINT8, [b"\x07"])


def f32(name: str, offset: int = 0, dims: tuple[int, ...] = (4,)) -> bytes:
    return tensor(name, list(dims), F32, offset)


def sound() -> dict[str, bytes]:
    """Small files that open; mutations of them are attacks."""
    kinds = [
        entry("architecture", STRING, string("llama")),
        entry("flag", BOOL, b"\x01"),
        entry("eps", FLOAT32, scalar(FLOAT32, 1e-5)),
        entry("small", INT16, scalar(INT16, -3)),
        entry("words", ARRAY, array(STRING, [string("a"), string(""), string("ccc")])),
        entry("flags", ARRAY, array(BOOL, [b"\x00\x01"], 2)),
        entry("deep", ARRAY, nested(4)),
        entry("ids", ARRAY, array(INT32, [scalar(INT32, i) for i in range(4)])),
    ]
    split = [
        entry("split.no", UINT16, scalar(UINT16, 0)),
        entry("split.count", UINT16, scalar(UINT16, 2)),
        entry("split.tensors.count", INT32, scalar(INT32, 2)),
    ]
    two = [tensor("a", [32, 2], Q8_0, 0), f32("b", 128)]
    return {
        "empty-model": gguf(),
        "v2": gguf(kinds[:2], [f32("a")], FOUR, version=2),
        "metadata": gguf(kinds),
        "two-tensors": gguf(kinds[:1], two, bytes(144)),
        "align-1": gguf([alignment(1)], [f32("a"), f32("b", 16)], FOUR * 2, align=1),
        "align-64": gguf([alignment(64)], [f32("a"), f32("b", 64)], bytes(80), align=64),
        "split": gguf(split, [f32("a")], FOUR),
        "empty-tensor": gguf([], [f32("a", 0, (0,)), f32("b")], FOUR),
    }


def lengths() -> dict[str, tuple[bytes, str]]:
    key = string("k")
    bombs = {
        "n-tensors": gguf(n_tensors=HUGE),
        "n-tensors-past-metadata": gguf([entry("k", UINT8, b"\x00")], n_tensors=4),
        "n-entries": gguf(n_entries=HUGE),
        "n-entries-max": gguf(n_entries=2**64 - 1),
        "key-length": gguf([u64(HUGE) + b"k" + bytes(16)]),
        "string-length": gguf([entry("k", STRING, u64(HUGE))]),
        "string-length-max": gguf([entry("k", STRING, u64(2**64 - 1) + b"text")]),
        "array-length-u8": gguf([entry("k", ARRAY, array(UINT8, [], HUGE))]),
        "array-length-u64-wraps": gguf([entry("k", ARRAY, array(UINT64, [], 2**61))]),
        "array-length-strings": gguf([entry("k", ARRAY, array(STRING, [], HUGE))]),
        "array-length-arrays": gguf([entry("k", ARRAY, array(ARRAY, [], HUGE))]),
        "inner-array-length": gguf(
            [entry("k", ARRAY, array(ARRAY, [array(UINT64, [], HUGE), bytes(64)]))]
        ),
        "string-in-array": gguf([entry("k", ARRAY, array(STRING, [string("a"), u64(HUGE)]))]),
        "tensor-name-length": gguf([], [u64(HUGE) + bytes(40)]),
        "lone-key": gguf([key + bytes(3)], n_entries=1),
    }
    return {name: (data, "TruncatedError") for name, data in bombs.items()}


def metadata() -> dict[str, tuple[bytes, str]]:
    one = entry("k", UINT8, b"\x01")
    bad = {
        "duplicate-key": gguf([one, entry("other", UINT8, b"\x01"), one]),
        "value-type-13": gguf([entry("k", 13, bytes(16))]),
        "value-type-max": gguf([entry("k", 2**32 - 1, bytes(16))]),
        "element-type-13": gguf([entry("k", ARRAY, array(13, []) + bytes(16))]),
        "bool-2": gguf([entry("k", BOOL, b"\x02")]),
        "bool-255-in-array": gguf([entry("k", ARRAY, array(BOOL, [b"\x00", b"\xff"]))]),
        "nested-9-deep": gguf([entry("k", ARRAY, nested(9))]),
        "nested-100000-deep": gguf([entry("k", ARRAY, nested(100_000))]),
    }
    for n in (0, 3, 24, 2**21, 2**31, 2**32 - 1):
        bad[f"alignment-{n}"] = gguf([alignment(n)], [f32("a")], FOUR)
    for name, kind in {"uint64": UINT64, "int32": INT32, "uint8": UINT8}.items():
        bad[f"alignment-{name}"] = gguf(
            [entry("general.alignment", kind, scalar(kind, 32))], [f32("a")], FOUR
        )
    bad["alignment-string"] = gguf([entry("general.alignment", STRING, string("32"))])
    bad["alignment-array"] = gguf([entry("general.alignment", ARRAY, array(UINT32, [u32(32)]))])
    return {name: (data, "MalformedError") for name, data in bad.items()}


def tensors() -> dict[str, tuple[bytes, str]]:
    def one(*args: object, data: bytes = bytes(256), **kwargs: int) -> bytes:
        return gguf([], [tensor("w", *args, **kwargs)], data)  # type: ignore[arg-type]

    bad = {
        "n-dims-0": one([], F32, 0),
        "n-dims-5": one([1] * 5, F32, 0),
        "n-dims-9": one([1] * 9, F32, 0),
        "n-dims-max": one([4], F32, 0, n_dims=2**32 - 1),
        "dim-over-int32": one([4, 2**31], F32, 0),
        "dim-max": one([2**64 - 1], F32, 0),
        "dims-wrap-to-0": one([2**30, 2**30, 2**4], F32, 0),
        "dims-wrap-to-16": one([2**31 - 1, 2**31 - 1, 2**31 - 1], F32, 0),
        "dims-wrap-before-0": one([2**31 - 4, 2**31 - 1, 2**31 - 1, 0], F32, 0),
        "row-bytes-over-int32": one([2**31 - 32, 1], Q8_0, 0),
        "q4_0-of-33": one([33], Q4_0, 0),
        "q8_0-of-16": one([16, 2], Q8_0, 0),
        "q4_k-of-640": one([640], Q4_K, 0),
        "offset-33": one([4], F32, 33),
        "offset-near-2^64": one([4], F32, 2**64 - 32),
        "duplicate-tensor": gguf([], [f32("w"), f32("v", 32), f32("w", 64)], bytes(80)),
        "overlap-by-4-bytes": gguf([], [f32("v", 0, (9,)), f32("w", 32)], bytes(64)),
        "overlap-whole": gguf([], [f32("v"), f32("w")], bytes(32)),
        "overlap-backwards": gguf([], [f32("v", 32), f32("w", 0, (99,))], bytes(512)),
    }
    cut = {
        "offset-past-end": one([4], F32, 2**20),
        "offset-2^62": one([4], F32, 2**62),
        "one-byte-short": one([4], F32, 0, data=bytes(15)),
        "no-data-section": gguf([], [f32("w")]),
        "empty-tensor-past-end": one([0], F32, 2**20),
    }
    unknown = {
        "type-4": one([32], 4, 0),
        "type-99": one([32], 99, 0),
        "type-max": one([32], 2**32 - 1, 0),
    }
    return (
        {name: (data, "MalformedError") for name, data in bad.items()}
        | {name: (data, "TruncatedError") for name, data in cut.items()}
        | {name: (data, "UnsupportedTypeError") for name, data in unknown.items()}
    )


def versions() -> dict[str, tuple[bytes, str]]:
    numbers = {"v0": 0, "v1": 1, "v4": 4, "v99": 99, "v3-swapped": 3 << 24, "v2-swapped": 2 << 24}
    return {name: (gguf(version=v) + bytes(64), "VersionError") for name, v in numbers.items()}


def other_files() -> dict[str, tuple[bytes, str]]:
    table = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    starts = {
        "zip": b"PK\x03\x04" + bytes(60),
        "safetensors": u64(len(table)) + table + FOUR,
        "npy": b"\x93NUMPY\x01\x00" + bytes(60),
        "ggml": b"lmgg" + bytes(60),
        "ggjt": b"tjgg" + bytes(60),
        "lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        "html": b"<!DOCTYPE html><title>Not found</title>",
        "magic-backwards": b"FUGG" + bytes(60),
        "zeros": bytes(64),
        "one-wrong-byte": b"X",
    }
    return {name: (data, "NotGGUFError") for name, data in starts.items()}


def attacks() -> dict[str, tuple[bytes, str]]:
    """Name -> (file, name of the error class)."""
    return lengths() | metadata() | tensors() | versions() | other_files()


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    files = sound() | {name: data for name, (data, _) in attacks().items()}
    for name, data in files.items():
        (folder / f"{name}.gguf").write_bytes(data)


if __name__ == "__main__":
    main()
