"""An extension that does not fit MLX says so at import, in one sentence."""

from __future__ import annotations

from importlib import metadata

import mlx.core as mx
import pytest

import mlx_gguf as gg
from mlx_gguf import _ext
from subprocesses import failing

PRETEND = """
from importlib import metadata
real = metadata.version
def version(name):
    if name == "mlx":
        {what}
    return real(name)
metadata.version = version
import mlx_gguf
"""


@pytest.mark.parametrize(
    ("what", "received"),
    [
        ('return "0.99.1"', "0.99.1"),
        ('raise metadata.PackageNotFoundError("mlx")', "none"),
    ],
)
def test_another_mlx_is_refused_with_both_versions_and_a_command(what, received):
    done = failing(PRETEND.format(what=what))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: [mlx_gguf] Expected mlx ")
    want = _ext.built_with_mlx
    assert f"Expected mlx {want}, " in last
    assert f"Received mlx {received}; run: pip install 'mlx=={want}'" in last


def test_an_mlx_without_a_backend_is_refused():
    code = "import sys; sys.modules['mlx.core'] = None\nimport mlx_gguf"
    done = failing(code)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: [mlx_gguf] Expected mlx")
    assert "pip install 'mlx-gguf[cpu]'" in last


def test_another_abi_is_refused():
    code = """
import sys, types
import importlib.util, mlx.core
spec = importlib.util.find_spec("mlx_gguf")
fake = types.ModuleType("mlx_gguf._ext")
fake.shares_mlx_types = False
fake.built_with_nanobind = "3.1.0"
fake.running_mlx = "0.32.4"
sys.modules["mlx_gguf._ext"] = fake
package = types.ModuleType("mlx_gguf")
package.__path__ = list(spec.submodule_search_locations)
package._ext = fake
sys.modules["mlx_gguf"] = package
import mlx_gguf._abi
"""
    done = failing(code)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: [mlx_gguf] Expected an mlx ")
    assert "nanobind 3.1.0's ABI. Received mlx 0.32.4 with another; run: pip install" in last


def test_this_build_fits():
    assert _ext.shares_mlx_types
    assert _ext.built_with_mlx == metadata.version("mlx")
    assert _ext.running_mlx.startswith(_ext.built_with_mlx)
    assert gg.__version__ == metadata.version("mlx-gguf")
    assert type(gg.dequantize(mx.zeros((1, 144), mx.uint8), "q4_k")) is mx.array
