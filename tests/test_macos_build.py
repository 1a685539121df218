"""The checks of the macOS build (tools/macos/) on libraries made for them, good and bad.

`make macos` builds the real extension; here the checks themselves must be able to fail.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("macholib", reason="reads the Mach-O files")
pytest.importorskip("ziglang", reason="links for macOS")

ROOT = Path(__file__).resolve().parent.parent
RPATH = "@loader_path/../mlx/lib"
ABI = 'const char* abi = "nanobind_{}_v22";\n'
# Stands for MLX's library and its Python module, which shows that strdup exists.
LIBMLX = 'void _ZN3mlx4core4evalEv(void) {}\n__attribute__((visibility("hidden"))) int f;'
CORE = "char* strdup(const char*);\nchar* g(const char* c) { return strdup(c); }\n"
EXTENSION = """
extern void _ZN3mlx4core4evalEv(void);
extern void* PyModule_GetDict(const void*);
EXTRA
__attribute__((visibility("default"))) void* PyInit__ext(void) {
  _ZN3mlx4core4evalEv();
  CALL
  return PyModule_GetDict(abi);
}
"""


@pytest.fixture(scope="module")
def extension():
    path = ROOT / "tools/macos/extension.py"
    spec = importlib.util.spec_from_file_location("macos_extension", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Linker:
    """Links small dynamic libraries for arm64 macOS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mlx = folder / "mlx"
        (self.mlx / "lib").mkdir(parents=True)
        self.link("mlx/lib/libmlx.dylib", LIBMLX, "-install_name", "@rpath/libmlx.dylib")
        self.link("mlx/core.macos.so", ABI.format("system") + CORE)

    def link(self, name: str, text: str, *flags: str) -> Path:
        target = self.folder / name
        source = target.with_suffix(".c")
        source.write_text(text)
        command = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-macos.14.0"]
        command += ["-dynamiclib", "-undefined", "dynamic_lookup", "-Wl,-x", *flags]
        subprocess.run([*command, str(source), "-o", str(target)], check=True)
        return target

    def extension(self, extra="", call="", abi="system", rpath=RPATH, hidden=True) -> Path:
        text = ABI.format(abi) + EXTENSION.replace("EXTRA", extra).replace("CALL", call)
        flags = [f"-Wl,-rpath,{rpath}", str(self.mlx / "lib/libmlx.dylib")]
        flags += ["-fvisibility=hidden"] if hidden else []
        return self.link("_ext.so", text, *flags)


@pytest.fixture(scope="module")
def linker(tmp_path_factory) -> Linker:
    return Linker(tmp_path_factory.mktemp("macos"))


def test_a_good_extension_passes(extension, linker):
    report = extension.check(linker.extension(), linker.mlx)
    assert "1 in libmlx.dylib" in report
    assert "1 in Python" in report


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"extra": "void _ZN3mlx4core6hiddenEv(void);", "call": "_ZN3mlx4core6hiddenEv();"},
            "_ZN3mlx4core6hiddenEv",
        ),
        ({"extra": "void PyNo_Such(void);", "call": "PyNo_Such();"}, "_PyNo_Such"),
        (
            {"extra": "void _ZNSt3__16newestEv(void);", "call": "_ZNSt3__16newestEv();"},
            "_ZNSt3__16newestEv",
        ),
        ({"abi": "other"}, "nanobind_other_v22"),
        ({"rpath": "/usr/local/lib"}, "/usr/local/lib"),
        ({"hidden": False}, "_abi"),
    ],
    ids=["mlx symbol", "Python symbol", "new libc++", "ABI", "run path", "exports"],
)
def test_a_bad_extension_is_refused_by_name(extension, linker, change, named):
    with pytest.raises(extension.CheckError, match=r"^\[macos\] Expected ") as error:
        extension.check(linker.extension(**change), linker.mlx)
    assert named in str(error.value)


def test_device_code_is_plain_ascii():
    # MLX hands the source to Metal's compiler as ASCII.
    for path in [*(ROOT / "metal").rglob("*.h"), *(ROOT / "metal").rglob("*.metal")]:
        assert path.read_bytes().isascii(), path.name
