"""nanobind finds nothing of ours at exit; `make sanitize` asks the same of memory."""

from __future__ import annotations

import re
from pathlib import Path

from subprocesses import failing

EVERYTHING = Path(__file__).parent / "sanitize" / "everything.py"

WARN = "from mlx_gguf import _ext; _ext.set_leak_warnings(True)\n"

LEAK = """
import ctypes
import mlx_gguf as gg
ctypes.pythonapi.Py_IncRef(ctypes.py_object(gg.formats()[0]))
"""


# MLX's generator of random numbers and its functions: MLX lets go of them in some programs alone.
OF_MLX = {"mlx.core.random._RandomState", "__iter__", "__len__", "__getitem__"}


def left(code):
    done = failing(code)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r' - leaked .*"(.*)"', done.stderr))


def test_nothing_of_ours_is_left_at_exit():
    assert left(EVERYTHING.read_text()) <= OF_MLX


def test_an_object_that_is_left_would_be_reported():
    assert "mlx_gguf._ext.Format" in left(WARN + LEAK)
