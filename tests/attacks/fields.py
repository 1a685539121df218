"""One small sound file with each field of its header at 0, 1, what is left, one more, and its most.

What is left are the bytes behind the field, beyond which no length or count can be honest.
"""

from __future__ import annotations

from gguf_bytes import ARRAY, F32, STRING, UINT8, array, entry, gguf, string, tensor

BASE = gguf(
    [entry("kkkk", STRING, string("ssss")), entry("aaaa", ARRAY, array(UINT8, [b"\1\2\3"], 3))],
    [tensor("tttt", [4, 2], F32, 0)],
    bytes(32),
)


def _at(text: bytes, past: int) -> int:
    return BASE.index(text) + past


# Name -> (position, width in bytes, whether it says how much follows).
FIELDS = {
    "version": (4, 4, False),
    "n-tensors": (8, 8, True),
    "n-entries": (16, 8, True),
    "key-length": (_at(b"kkkk", -8), 8, True),
    "value-type": (_at(b"kkkk", 4), 4, False),
    "string-length": (_at(b"ssss", -8), 8, True),
    "element-type": (_at(b"aaaa", 8), 4, False),
    "array-length": (_at(b"aaaa", 12), 8, True),
    "name-length": (_at(b"tttt", -8), 8, True),
    "n-dims": (_at(b"tttt", 4), 4, False),
    "dim-0": (_at(b"tttt", 8), 8, False),
    "dim-1": (_at(b"tttt", 16), 8, False),
    "tensor-type": (_at(b"tttt", 24), 4, False),
    "offset": (_at(b"tttt", 28), 8, False),
}


def with_field(name: str, value: int) -> bytes:
    position, width, _ = FIELDS[name]
    return BASE[:position] + value.to_bytes(width, "little") + BASE[position + width :]


def fields() -> dict[str, tuple[bytes, str | None]]:
    """Name -> (file, name of the error class, or None where it may also open)."""
    found: dict[str, tuple[bytes, str | None]] = {}
    for name, (position, width, counts) in FIELDS.items():
        left = len(BASE) - position - width
        most = 2 ** (8 * width) - 1
        for label, value in {"0": 0, "1": 1, "left": left, "more": left + 1, "most": most}.items():
            data = with_field(name, value)
            if data != BASE:
                refused = counts and value > left
                found[f"{name}-{label}"] = (data, "TruncatedError" if refused else None)
    return found
