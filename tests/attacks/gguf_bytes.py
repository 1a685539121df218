"""GGUF files spelled out byte by byte, so that they can be wrong in every way.

Nothing here shares code with the reader or with gguf-py, whose writer refuses most of this.
"""

from __future__ import annotations

import struct

# Value types and tensor types, by the numbers of the file format.
UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32 = range(7)
BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(7, 13)
F32, F16, Q4_0, Q8_0, Q4_K = 0, 1, 2, 8, 12
CODES = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def scalar(kind: int, x: object) -> bytes:
    if kind == STRING:
        assert isinstance(x, str | bytes)
        return string(x)
    return struct.pack("<" + CODES[kind], x)


def array(kind: int, payloads: list[bytes], count: int | None = None) -> bytes:
    """Payload of an array of elements of type `kind`; `count` may lie."""
    return u32(kind) + u64(len(payloads) if count is None else count) + b"".join(payloads)


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + u32(kind) + payload


def alignment(n: int) -> bytes:
    return entry("general.alignment", UINT32, u32(n))


def tensor(
    name: str | bytes, dims: list[int], kind: int, offset: int, n_dims: int | None = None
) -> bytes:
    """Table row of a tensor. `dims` are in the file's order: K first."""
    count = len(dims) if n_dims is None else n_dims
    return string(name) + u32(count) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def gguf(
    entries: list[bytes] = (),  # type: ignore[assignment]
    tensors: list[bytes] = (),  # type: ignore[assignment]
    data: bytes = b"",
    *,
    version: int = 3,
    align: int = 32,
    n_entries: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(entries) if n_entries is None else n_entries)
    head += b"".join(entries) + b"".join(tensors)
    if data:
        head += bytes(-len(head) % align)
    return head + data
