"""The command line: ``mlx-gguf inspect | generate | chat | eval | bench | demo |
doctor | tune``.

Results go to standard output, all else to standard error. A wrong file or option is one
line and exit code 2, a failed check is 1, Ctrl-C is 130, and a reader that goes away is no
error to speak of.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..file import MissingKeyError
from . import bench, chat, demo, doctor, evaluate, generate, inspect, tune

_COMMANDS = (inspect, generate, chat, evaluate, bench, demo, doctor, tune)

# Exit codes as shells have them: wrong usage, and 128 + the signal's number.
_ERROR, _INTERRUPTED, _CLOSED_PIPE = 2, 130, 141


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="mlx-gguf", description="Run GGUF models in MLX, on the file's own quantised bytes."
    )
    parser.add_argument("--version", action="version", version=f"mlx-gguf {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments. Default: those of the process.
    """
    args = build_parser().parse_args(argv)
    try:
        code = args.run(args) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more on its way out; there must be something to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, OSError, ImportError, MissingKeyError, NotImplementedError) as error:
        print(f"mlx-gguf: error: {_one_line(error, args.command)}", file=sys.stderr)
        return _ERROR
    return code


def _one_line(error: Exception, command: str) -> str:
    text = str(error)
    # OSError's own wording, "[Errno 2] ...", would hide the sentence in it.
    if isinstance(error, OSError) and str(error.strerror).startswith("["):
        text = f"{error.strerror}: {error.filename!r}"
    elif not text.startswith("["):
        text = f"[{command}] {text}"
    return " ".join(text.split())
