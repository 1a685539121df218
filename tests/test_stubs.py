"""The type stubs of the extension are those of its code: `make stubs` makes them again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STUBS = Path(__file__).parent.parent / "python" / "mlx_gguf" / "_ext.pyi"


def test_the_stubs_are_up_to_date(tmp_path):
    made = tmp_path / "_ext.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "mlx_gguf._ext", "-o", made]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert made.read_text() == STUBS.read_text()
