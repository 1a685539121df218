"""GGUF files: metadata, tensor tables and tensors as MLX arrays on the file itself."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import _ext
from .errors import MissingKeyError

__all__ = ["GGUFFile", "Metadata", "TensorInfo", "open"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file describes it.

    Attributes
    ----------
    name : str
        The tensor's name in the file.
    qtype : str
        GGUF's name of the type, lower case: ``"q4_k"``, ``"f32"``, ...
    shape : tuple of int
        The weights' shape in MLX order, for example ``(N, K)``.
    nbytes : int
        Bytes the tensor takes in the file.
    offset : int
        Where its data starts, in bytes from the start of its file.
    shard : int
        Index into :attr:`GGUFFile.paths`.
    """

    name: str
    qtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    shard: int


class Metadata(Mapping[str, Any]):
    """The metadata of a file: a read-only mapping from key to Python value.

    Values are ``int``, ``float``, ``bool``, ``str`` or (nested) lists of them. Each
    is decoded when it is first asked for, so a large vocabulary costs nothing
    until then. Bytes that are not UTF-8 become lone surrogates:
    ``s.encode("utf-8", "surrogateescape")`` gives them back.
    """

    def __init__(self, file: _ext.OpenFile, path: str):
        self._file = file
        self._path = path
        self._index = {key: i for i, key in enumerate(file.keys())}
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = self._file.value(self._position(key))
        return self._values[key]

    def get(self, key: str, default: Any = None) -> Any:
        # The mapping's own makes the error that names keys like this one, and drops it.
        return self[key] if key in self else default  # noqa: SIM401

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def type_of(self, key: str) -> str:
        """Name the type of a value without decoding it.

        Returns
        -------
        str
            GGUF's name, such as ``"uint32"``, or ``"array[string]"``.
        """
        name, element, _ = self._file.value_type(self._position(key))
        return name if element is None else f"{name}[{element}]"

    def length_of(self, key: str) -> int | None:
        """Count the elements of an array without decoding it; ``None`` for a scalar."""
        return self._file.value_type(self._position(key))[2]

    def _position(self, key: str) -> int:
        try:
            return self._index[key]
        except KeyError:
            raise _missing("metadata", "a metadata key", key, self._index, self._path) from None

    def __repr__(self) -> str:
        def show(key: str) -> str:
            length = self.length_of(key)
            text = repr(self[key]) if length is None else f"<{self.type_of(key)}, {length} long>"
            return f"{key!r}: {text}"

        return "Metadata({" + ", ".join(map(show, self)) + "})"


class Tensors(Mapping[str, TensorInfo]):
    """The tensor table of a file: a read-only mapping from name to :class:`TensorInfo`."""

    def __init__(self, file: _ext.OpenFile, path: str):
        self._path = path
        self._infos = {row[0]: TensorInfo(*row) for row in file.tensors()}

    def __getitem__(self, name: str) -> TensorInfo:
        try:
            return self._infos[name]
        except KeyError:
            raise _missing("tensors", "a tensor", name, self._infos, self._path) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __repr__(self) -> str:
        return f"Tensors({list(self._infos.values())!r})"


class GGUFFile:
    """An open GGUF file or split set; made by :func:`open`.

    ``file[name]`` is the tensor as an ``mx.array``: uint8 of shape
    ``(..., N, row_bytes)`` of a packed type, and the type's own dtype and shape of
    a plain one (f32, f16, bf16, f64, integers). The array lies on the mapped file
    where the device can use it, and keeps the mapping alive by itself: the
    file object may go first, and the file may be renamed, deleted or replaced by
    a rename. It is a copy where the device needs one or the data is not aligned.
    The mapped pages are read-only: MLX never writes to them, and a NumPy view made
    with ``copy=False`` must not either. Writing into the mapped file itself changes
    arrays, and shortening it ends a process that reads what is lost: save to another
    name and rename, or open with ``copy=True``.

    Raises
    ------
    MissingKeyError
        A KeyError, by ``file[name]``, when there is no such tensor.
    TruncatedError
        By ``file[name]``, when the file was shortened since it was opened.
    UnsupportedTypeError
        By ``file[name]``, when the tensor is packed in a type without kernels.
    """

    def __init__(self, file: _ext.OpenFile, path: str):
        self._file = file
        self._path = path
        self._paths = tuple(file.paths())
        self._metadata = Metadata(file, path)
        self._tensors = Tensors(file, path)
        self._index = {name: i for i, name in enumerate(self._tensors)}

    @property
    def path(self) -> str:
        """The path the file was opened by."""
        return self._path

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all shards, in order; one path unless the model is split."""
        return self._paths

    @property
    def version(self) -> int:
        """The version of the file format, 2 or 3."""
        return self._file.version

    @property
    def metadata(self) -> Metadata:
        """The metadata; of a split set, the first shard's."""
        return self._metadata

    @property
    def tensors(self) -> Tensors:
        """The tensor table, over all shards."""
        return self._tensors

    @property
    def architecture(self) -> str:
        """The model architecture: metadata ``general.architecture``."""
        return self._metadata["general.architecture"]

    def __getitem__(self, name: str) -> mx.array:
        return self._array(name)

    def _array(self, name: str, later: bool = False) -> mx.array:
        """A tensor; a copy in a GPU's own memory is made when it is evaluated, if `later`."""
        self._tensors[name]
        return self._file.array(self._index[name], later)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __repr__(self) -> str:
        shards = f", {len(self._paths)} shards" if len(self._paths) > 1 else ""
        return (
            f"GGUFFile({self._path!r}{shards}, version {self.version}, "
            f"{len(self._metadata)} metadata keys, {len(self._tensors)} tensors)"
        )


def open(path: str | os.PathLike[str], *, copy: bool = False) -> GGUFFile:
    """Open a GGUF file: check all of its header and map it into memory.

    Parameters
    ----------
    path : str or path-like
        A ``.gguf`` file, version 2 or 3. Any shard of a split model opens the
        whole set.
    copy : bool, optional
        Read the file into memory instead of mapping it. Meant for files that
        another program may shorten or overwrite in place while they are in use.

    Returns
    -------
    GGUFFile

    Raises
    ------
    NotGGUFError
        Another kind of file, or no regular file.
    VersionError
        A version or byte order that is not read here.
    TruncatedError
        The file ends before what its header promises.
    MalformedError
        The header contradicts the format.
    UnsupportedTypeError
        A tensor type whose size is not known.
    OSError
        The operating system refused, for example FileNotFoundError.
    """
    return GGUFFile(_ext.open_file(os.fsencode(path), copy), os.fsdecode(path))


def _missing(
    op: str, expected: str, name: object, known: Iterable[str], path: str
) -> MissingKeyError:
    close = difflib.get_close_matches(str(name), known, n=3)
    hint = f" Close: {', '.join(close)}." if close else ""
    return MissingKeyError(f"[{op}] Expected {expected} of {path!r}. Received {name!r}.{hint}")
