"""Build the extension and a wheel for arm64 macOS 14 on any machine, and check both.

The compiler is the clang of the package ziglang, MLX's headers and library come from its
macOS wheels, and the wheel is for the version of Python that runs this script, whose headers
it uses. Nothing of the result is run: that takes a Mac (``mlx-gguf doctor``).

Run as ``python tools/macos/build.py``; needs ziglang, macholib, cmake, ninja, nanobind and
scikit-build-core.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import extension
import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLATFORM = "macosx_14_0_arm64"
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
SOABI = f"cpython-{PYTHON[2:]}-darwin"
MAX_WHEEL_BYTES = 3 << 20

# zig links a C++ library of its own into everything, which would make our exceptions other
# types than MLX's. So its headers are set up as Apple's are, to use only what the system's
# library has in the version aimed at, and that library is found at load time. Its linker
# makes no bundles; Python loads a dynamic library as well.
COMPILER = """\
#!/bin/sh
for arg; do
  shift
  case $arg in
    -bundle) set -- "$@" -dynamiclib -nostdlib++ -install_name @rpath/_ext.{soabi}.so ;;
    *) set -- "$@" "$arg" ;;
  esac
done
exec "{zig}" c++ -target aarch64-macos.14.0 \\
  -U_LIBCPP_DISABLE_VISIBILITY_ANNOTATIONS \\
  -U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS \\
  -D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1 "$@"
"""


def run(*command: str | Path, **kwargs) -> None:
    subprocess.run([str(part) for part in command], check=True, **kwargs)


def mlx_version() -> str:
    """The version of MLX that pyproject.toml pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = (d for d in project["dependencies"] if d.startswith("mlx=="))
    return pin.removeprefix("mlx==")


def fetch_mlx(build: Path) -> Path:
    """MLX's macOS wheels, unpacked. Returns the folder of the package ``mlx``."""
    version = mlx_version()
    unpacked = build / f"mlx-{version}-{PYTHON}"
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(dir=build) as folder:
            run(
                *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
                *("--only-binary=:all:", f"--platform={PLATFORM}", f"--dest={folder}"),
                *(f"mlx=={version}", f"mlx-metal=={version}"),
            )
            parts = Path(folder) / "unpacked"
            for wheel in Path(folder).glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    # The compiled kernels are most of the wheel and not needed to build.
                    names = [n for n in archive.namelist() if not n.endswith(".metallib")]
                    archive.extractall(parts, names)
            parts.rename(unpacked)
    return unpacked / "mlx"


def write_tools(build: Path) -> Path:
    """Commands that CMake can call for zig's."""
    import ziglang

    zig = Path(ziglang.__file__).parent / "zig"
    tools = build / "tools"
    tools.mkdir(exist_ok=True)
    scripts = {"c++": COMPILER.format(zig=zig, soabi=SOABI)}
    for name in ("ar", "ranlib"):
        scripts[name] = f'#!/bin/sh\nexec "{zig}" {name} "$@"\n'
    for name, text in scripts.items():
        path = tools / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            path.chmod(0o755)
    return tools


def python_headers(build: Path) -> Path:
    """This Python's headers with the configuration of macOS."""
    target = build / f"include-{PYTHON}"
    if not target.exists():
        shutil.copytree(sysconfig.get_path("include"), target, symlinks=False)
    config, ours = target / "pyconfig.h", HERE / "pyconfig.h"
    if config.read_bytes() != ours.read_bytes():
        config.unlink()
        shutil.copyfile(ours, config)
    return target


def compile_extension(build: Path, mlx: Path) -> Path:
    """Configures once, compiles what changed. Returns the extension."""
    import cmake
    import ninja

    path = os.pathsep.join([cmake.CMAKE_BIN_DIR, ninja.BIN_DIR, os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    objects = build / f"cmake-{PYTHON}"
    run(
        *("cmake", "-G", "Ninja", "-S", ROOT, "-B", objects, "--log-level=WARNING"),
        f"-DCMAKE_TOOLCHAIN_FILE={HERE / 'toolchain.cmake'}",
        f"-DMACOS_TOOLS={write_tools(build)}",
        f"-DMLX_CMAKE_DIR={mlx / 'share/cmake/MLX'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_INCLUDE_DIR={python_headers(build)}",
        f"-DSKBUILD_SOABI={SOABI}",
        env=env,
    )
    run("cmake", "--build", objects, "--", "--quiet", env=env)
    return objects / f"_ext.{SOABI}.so"


def distribution_files(binary: Path) -> dict[str, bytes]:
    """Everything in the wheel but RECORD, by its path there."""
    from scikit_build_core.build import prepare_metadata_for_build_wheel

    package = ROOT / "python/mlx_gguf"
    files = {
        f"mlx_gguf/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    files[f"mlx_gguf/{binary.name}"] = binary.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path.cwd()
        os.chdir(ROOT)  # where a build backend is called
        try:
            info = Path(folder) / prepare_metadata_for_build_wheel(folder)
        finally:
            os.chdir(cwd)
        for path in sorted(info.rglob("*")):
            if path.is_file() and path.name != "RECORD":
                files[f"{info.name}/{path.relative_to(info).as_posix()}"] = path.read_bytes()
    files[f"{info.name}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: tools/macos/build.py\nRoot-Is-Purelib: false\n"
        f"Tag: {PYTHON}-{PYTHON}-{PLATFORM}\n"
    ).encode()
    return files


def pack(binary: Path, build: Path) -> Path:
    """Writes the wheel."""
    files = distribution_files(binary)
    info = next(name for name in files if name.endswith(".dist-info/WHEEL")).split("/")[0]
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
        rows.writerow([name, f"sha256={digest.decode()}", len(data)])
    rows.writerow([f"{info}/RECORD", "", ""])
    files[f"{info}/RECORD"] = record.getvalue().encode()

    stem = info.removesuffix(".dist-info")
    wheel = build / f"{stem}-{PYTHON}-{PYTHON}-{PLATFORM}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(entry, data)
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build/macos")
    build = parser.parse_args().build_dir.resolve()
    build.mkdir(parents=True, exist_ok=True)

    mlx = fetch_mlx(build)
    binary = compile_extension(build, mlx)
    report = extension.check(binary, mlx)
    wheel = pack(binary, build)
    size = wheel.stat().st_size
    if size > MAX_WHEEL_BYTES:
        raise SystemExit(f"Expected a wheel of at most {MAX_WHEEL_BYTES} bytes. Received {size}.")
    print(report)
    print(f"{wheel} ({size / 2**20:.2f} MiB)")
    print("Compiled and linked for arm64 macOS 14. Nothing was run: that takes a Mac.")


if __name__ == "__main__":
    main()
