"""Running Python code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(code: str, *args: str, **env: str) -> str:
    """The output of `code` in a fresh interpreter; its failure is ours."""
    done = failing(code, *args, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def failing(code: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    """Run `code`, which may end in an error."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | env
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
