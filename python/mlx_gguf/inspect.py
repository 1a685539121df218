"""What a GGUF file holds, as plain data: its header in figures, its types and their mix."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from gguf import LlamaFileType

from . import _ext
from .file import GGUFFile, TensorInfo
from .models import ARCHITECTURES, NOT_LANGUAGE_MODELS

__all__ = [
    "Mix",
    "TypeCount",
    "census",
    "count_weights",
    "describe",
    "metadata_value",
    "name_mix",
    "unsupported",
]

_PLAIN = frozenset({"f64", "f32", "f16", "bf16"})
_K_QUANTS = frozenset({"q2_k", "q3_k", "q4_k", "q5_k", "q6_k"})
# What llama.cpp's quantiser takes for rows that 256 does not divide.
_FALLBACKS = frozenset({"q4_0", "q5_0", "q5_1", "q8_0", "iq4_nl"})
# A mix as names of models write it: "... UD-Q4_K_XL", "...-Q4_K_M".
_NAMED = re.compile(
    r"(?<![a-z0-9])(?:UD-)?I?Q\d_(?:K_(?:XL|[SML])|XXS|XS|NL|[SMK01])(?![a-z0-9])", re.I
)


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


@dataclass(frozen=True)
class Mix:
    """The name of a file's mix of types.

    Attributes
    ----------
    name : str
        ``"Q4_K_M"``, ``"UD-Q4_K_XL-like"``, ``"BF16"``, ...; "-like" marks a guess.
    source : str
        Where the name is from: ``"general.name"``, ``"general.file_type"``, ``"uniform"``
        (all matrices of the layers have that type) or ``"guess"`` (from the census).
    """

    name: str
    source: str


def name_mix(file: GGUFFile) -> Mix:
    """Name the mix of a file's types.

    The name is what ``general.name`` says, else the type of a uniform file, else what
    ``general.file_type`` says where the tensors agree. Recipes that set the type tensor
    by tensor ("UD", Unsloth dynamic) leave the stock recipe's ``file_type`` in the file:
    they are recognised by types that the stock recipe never takes, and the name is then
    a guess. The embedding and the head, which have types of their own in uniform files
    too, do not count, nor do vectors.
    """
    if named := _NAMED.search(str(metadata_value(file, "general.name"))):
        return Mix(named[0].upper(), "general.name")
    matrices = [
        info for info in file.tensors.values() if info.name.startswith("blk.") and _is_matrix(info)
    ]
    packed: Counter[str] = Counter()
    for info in matrices:
        if info.qtype not in _PLAIN:
            packed[info.qtype] += info.nbytes
    types = packed.keys() or {info.qtype for info in matrices if info.qtype != "f32"}
    types = types or {info.qtype for info in matrices}
    if len(types) == 1:
        return Mix(next(iter(types)).upper(), "uniform")
    top = max(packed, key=lambda qtype: packed[qtype]) if packed else ""
    said = _file_type(file)
    # Where the file says a number of bits, that is a better guess than the most bytes.
    base = said[:4] if said and re.fullmatch(r"Q\d_K(_[SML])?", said) else top.upper()
    stock = said is None or said.startswith(base)
    if stock and base.lower() in _K_QUANTS and any(_is_foreign(info, file) for info in matrices):
        return Mix(f"UD-{base}_XL-like", "guess")
    if said is not None and any(said.lower().startswith(qtype) for qtype in types):
        return Mix(said, "general.file_type")
    if top in ("q4_k", "q5_k") and "q6_k" in types:
        return Mix(f"{top.upper()}_M-like", "guess")
    return Mix("mixed" if matrices else "no layers", "guess")


def _is_matrix(info: TensorInfo) -> bool:
    # The converter never packs the convolution, whose rows are four numbers.
    return len(info.shape) > 1 and "ssm_conv1d" not in info.name


def _is_foreign(info: TensorInfo, file: GGUFFile) -> bool:
    """Whether llama.cpp's recipes of K-quants would never give a tensor its type."""
    if info.qtype in _K_QUANTS or info.qtype in _PLAIN:
        return False
    if info.shape[-1] % 256 and info.qtype in _FALLBACKS:
        return False
    # They take Q8_0 for keys and values that eight experts share.
    eight = (
        metadata_value(file, f"{metadata_value(file, 'general.architecture')}.expert_count") == 8
    )
    return not (eight and info.qtype == "q8_0" and re.search(r"attn_[kv]\.", info.name))


def _file_type(file: GGUFFile) -> str | None:
    """The name of ``general.file_type``: ``"Q4_K_M"``, ``"F16"``, ..."""
    value = metadata_value(file, "general.file_type")
    # Above it, llama.cpp marks a number it has guessed itself.
    if not isinstance(value, int) or value >= LlamaFileType.GUESSED:
        return None
    try:
        return LlamaFileType(value).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return None


def unsupported(file: GGUFFile) -> list[str]:
    """Say what keeps a file from being loaded; an empty list where nothing does.

    Looked at are the architecture and the types of the tensors, not their shapes.
    """
    found = []
    arch = metadata_value(file, "general.architecture")
    if arch not in tuple(ARCHITECTURES):
        what = NOT_LANGUAGE_MODELS.get(str(arch))
        found.append(f"architecture {arch!r} cannot be loaded" + (f": {what}" if what else ""))
    found += [
        f"{row.qtype.upper()} has no kernels ({row.tensors} tensor{'s' * (row.tensors != 1)})"
        for row in census(file)
        if not row.supported
    ]
    return found


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
        ``tensor_bytes``, ``mix``, ``unsupported``, ``metadata``, ``types`` and ``tensors``.
        All sizes are in bytes.
    """
    mix = name_mix(file)
    report: dict[str, Any] = {
        "paths": list(file.paths),
        "version": file.version,
        "architecture": metadata_value(file, "general.architecture"),
        "name": metadata_value(file, "general.name"),
        "parameters": count_weights(file),
        "file_bytes": sum(os.path.getsize(path) for path in file.paths),
        "tensor_bytes": sum(info.nbytes for info in file.tensors.values()),
        "mix": {"name": mix.name, "source": mix.source},
        "unsupported": unsupported(file),
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
