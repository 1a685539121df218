"""Checks of an extension that was linked for macOS, read from its Mach-O file.

Symbols that the linker was told to leave to load time must be found there: MLX's in the real
``libmlx.dylib``, Python's in Python, and the system's among those that MLX's own macOS
binaries take from it.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from pathlib import Path

from macholib.mach_o import (
    LC_BUILD_VERSION,
    LC_CODE_SIGNATURE,
    LC_LOAD_DYLIB,
    LC_LOAD_WEAK_DYLIB,
    LC_REEXPORT_DYLIB,
    LC_RPATH,
    LC_SYMTAB,
    N_EXT,
    N_PEXT,
    N_STAB,
    N_TYPE,
    N_UNDF,
    nlist_64,
)
from macholib.MachO import MachO, MachOHeader
from macholib.ptypes import sizeof

LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
LIBRARIES = [LIBSYSTEM, "@rpath/libmlx.dylib"]
CPU_TYPE_ARM64 = 0x0100000C
RPATH = "@loader_path/../mlx/lib"
LINKER_MARKS = {"__mh_dylib_header", "___dso_handle"}
# Parts of C++11 that macOS's libc++ has had since before arm64, whether or not MLX's binaries
# use them. What is not listed here and not used by them may be newer than macOS 14.
OLD_LIBCXX = (
    "__ZNSt11logic_error",
    "__ZNSt3__115system_error",
    "__ZNSt3__116generic_categoryEv",
    "__ZNSt3__118condition_variable",
    "__ZNSt3__15mutex",
    "__ZNSt3__16thread",
    "__ZNSt3__19to_string",
    "__ZTISt",  # type_info and tables of the standard exceptions
    "__ZTVSt",
    "__ZdlPvm",  # operator delete with a size
    "__ZdaPvm",
    "__ZnamSt11align_val_t",  # aligned new and delete: since macOS 10.13
    "__ZdaPvSt11align_val_t",
)
# As nanobind writes its ABI into every extension: types are shared only between equal ones.
NANOBIND_ABI = re.compile(rb"nanobind_[a-z0-9_]*_v\d+")


class CheckError(Exception):
    """The extension would not load, or not work, on a Mac."""


def expect(condition: bool, expectation: str, received: object) -> None:
    if not condition:
        raise CheckError(f"[macos] Expected {expectation}. Received {received}.")


class Image:
    """The arm64 part of a Mach-O file: its load commands and symbols."""

    def __init__(self, path: Path) -> None:
        parts = [h for h in MachO(str(path)).headers if h.header.cputype == CPU_TYPE_ARM64]
        expect(len(parts) == 1, f"one part of {path.name} for arm64", len(parts))
        # What follows a load command is its text, if it has any.
        self.commands = [(load.cmd, command, data) for load, command, data in parts[0].commands]
        self.libraries = self.texts(LC_LOAD_DYLIB, LC_LOAD_WEAK_DYLIB, LC_REEXPORT_DYLIB)
        self.exports, self.imports = set(), {}
        for symbol, name in read_symbols(path, parts[0]):
            if symbol.n_type & N_STAB or not symbol.n_type & N_EXT or symbol.n_type & N_PEXT:
                continue
            if symbol.n_type & N_TYPE == N_UNDF:
                # Which library the linker took it from, counted from 1.
                self.imports[name] = symbol.n_desc >> 8 & 0xFF
            else:
                self.exports.add(name)

    def texts(self, *kinds: int) -> list[str]:
        return [data.rstrip(b"\0").decode() for cmd, _, data in self.commands if cmd in kinds]

    def taken_from(self, library: str) -> set[str]:
        """The imports that the linker itself found in a library."""
        ordinal = self.libraries.index(library) + 1
        return {name for name, at in self.imports.items() if at == ordinal}


def read_symbols(path: Path, part: MachOHeader) -> list[tuple[nlist_64, str]]:
    """The symbol table with its names."""
    (table,) = (command for load, command, _ in part.commands if load.cmd == LC_SYMTAB)
    data = path.read_bytes()[part.offset :]
    names = data[table.stroff : table.stroff + table.strsize]
    size = sizeof(nlist_64)
    out = []
    for at in range(table.symoff, table.symoff + table.nsyms * size, size):
        symbol = nlist_64.from_str(data[at : at + size], _endian_="<")
        out.append((symbol, names[symbol.n_un : names.index(b"\0", symbol.n_un)].decode()))
    return out


def check_commands(image: Image) -> None:
    """For which system, from where, with what."""
    minimum = [c.minos >> 16 for cmd, c, _ in image.commands if cmd == LC_BUILD_VERSION]
    expect(minimum == [14], "an extension for macOS 14", minimum)
    rpaths = image.texts(LC_RPATH)
    expect(rpaths == [RPATH], f"the run path {RPATH}", rpaths)
    expect(image.libraries == LIBRARIES, f"the libraries {LIBRARIES}", image.libraries)
    signed = any(cmd == LC_CODE_SIGNATURE for cmd, _, _ in image.commands)
    expect(signed, "a signature, without which arm64 loads nothing", "none")


def check_symbols(image: Image, libmlx: Image, core: Image) -> Counter:
    """Finds every imported symbol; counts them by where they are found."""
    system = image.taken_from(LIBSYSTEM) | libmlx.imports.keys() | core.imports.keys()
    system = {name for name in system if "mlx" not in name}
    found: Counter = Counter()
    missing = []
    for name in sorted(image.imports):
        if name in libmlx.exports:
            found["libmlx.dylib"] += 1
        elif name.startswith(("_Py", "__Py")) and hasattr(ctypes.pythonapi, name[1:]):
            found["Python"] += 1
        elif name in system or name.startswith(OLD_LIBCXX):
            found["macOS"] += 1
        else:
            missing.append(name)
    expect(not missing, "every imported symbol to exist", f"unknown ones: {' '.join(missing)}")
    exported = image.exports - LINKER_MARKS
    expect(exported == {"_PyInit__ext"}, "_PyInit__ext alone exported", exported)
    return found


def check_nanobind(binary: Path, core: Path) -> str:
    """MLX's arrays are the class that our functions take only if both have one ABI."""
    ours = set(NANOBIND_ABI.findall(binary.read_bytes()))
    theirs = set(NANOBIND_ABI.findall(core.read_bytes()))
    expect(len(ours) == 1 and ours == theirs, f"nanobind's ABI of MLX, {theirs}", ours)
    return ours.pop().decode()


def check(path: Path, mlx: Path) -> str:
    """Checks the extension at `path` against the unpacked package `mlx`.

    Returns
    -------
    str
        What was found, for people.

    Raises
    ------
    CheckError
        The extension would not load, or not work, on a Mac.
    """
    image = Image(path)
    (core,) = mlx.glob("core.*.so")
    check_commands(image)
    found = check_symbols(image, Image(mlx / "lib/libmlx.dylib"), Image(core))
    abi = check_nanobind(path, core)
    counts = ", ".join(f"{n} in {place}" for place, n in sorted(found.items()))
    return f"{path.name}: all {found.total()} imported symbols found: {counts}\nsame ABI: {abi}"
