"""What a GGUF file holds, as plain data: its header in figures and a census of its types."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from . import _ext
from .file import GGUFFile, TensorInfo

__all__ = ["TypeCount", "census", "count_weights", "describe", "metadata_value"]


@dataclass(frozen=True)
class TypeCount:
    """All tensors of one type in a file.

    Attributes
    ----------
    qtype : str
        GGUF's name of the type, lower case.
    tensors : int
        How many tensors have it.
    weights : int
        How many weights they hold.
    nbytes : int
        Bytes they take in the file.
    share : float
        Their part of the bytes of all tensors, 0 to 1.
    supported : bool
        Whether the operations take the type.
    """

    qtype: str
    tensors: int
    weights: int
    nbytes: int
    share: float
    supported: bool

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file per weight; 0 if there are no weights."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0


def is_supported(qtype: str) -> bool:
    """Whether the operations take a tensor type."""
    found = _ext.find_format(qtype)
    return found is not None and found.supported


def census(file: GGUFFile) -> list[TypeCount]:
    """Count a file's tensors by type, the type with the most bytes first."""
    by_type: dict[str, list[TensorInfo]] = {}
    for info in file.tensors.values():
        by_type.setdefault(info.qtype, []).append(info)
    total = sum(info.nbytes for info in file.tensors.values())
    rows = []
    for qtype, infos in by_type.items():
        nbytes = sum(info.nbytes for info in infos)
        weights = sum(math.prod(info.shape) for info in infos)
        share = nbytes / total if total else 0.0
        rows.append(TypeCount(qtype, len(infos), weights, nbytes, share, is_supported(qtype)))
    return sorted(rows, key=lambda row: (-row.nbytes, row.qtype))


def count_weights(file: GGUFFile) -> int:
    """Count the numbers in all tensors of a file."""
    return sum(math.prod(info.shape) for info in file.tensors.values())


def metadata_value(file: GGUFFile, key: str) -> Any:
    """Return a metadata value fit for JSON; an array as its type and length alone.

    Returns
    -------
    int, float, bool, str, dict or None
        ``{"type": "array[string]", "length": 262144}`` of an array; the name of a
        number that JSON does not have (``"nan"``, ``"inf"``); ``None`` without the key.
    """
    if key not in file.metadata:
        return None
    length = file.metadata.length_of(key)
    if length is not None:
        return {"type": file.metadata.type_of(key), "length": length}
    value = file.metadata[key]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def describe(file: GGUFFile, *, tensors: bool = True) -> dict[str, Any]:
    """Describe a file as JSON-ready data.

    Parameters
    ----------
    file : GGUFFile
    tensors : bool, optional
        Whether to list the tensors one by one. Default: ``True``.

    Returns
    -------
    dict
        ``paths``, ``version``, ``architecture``, ``name``, ``parameters``, ``file_bytes``,
        ``tensor_bytes``, ``metadata``, ``types`` and ``tensors``. All sizes are in bytes.
    """
    report: dict[str, Any] = {
        "paths": list(file.paths),
        "version": file.version,
        "architecture": metadata_value(file, "general.architecture"),
        "name": metadata_value(file, "general.name"),
        "parameters": count_weights(file),
        "file_bytes": sum(os.path.getsize(path) for path in file.paths),
        "tensor_bytes": sum(info.nbytes for info in file.tensors.values()),
        "metadata": {key: metadata_value(file, key) for key in file.metadata},
        "types": [
            {
                "type": row.qtype,
                "tensors": row.tensors,
                "parameters": row.weights,
                "bytes": row.nbytes,
                "share": row.share,
                "bits_per_weight": row.bits_per_weight,
                "supported": row.supported,
            }
            for row in census(file)
        ],
    }
    if tensors:
        report["tensors"] = [
            {
                "name": info.name,
                "type": info.qtype,
                "shape": list(info.shape),
                "bytes": info.nbytes,
                "offset": info.offset,
                "shard": info.shard,
            }
            for info in file.tensors.values()
        ]
    return report
