"""Packs a fuzzing corpus into one file, the same bytes for the same corpus: pack.py FOLDER ZIP."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        inputs = sorted({path.read_bytes() for path in folder.iterdir()})
        for i, data in enumerate(inputs):
            out.writestr(zipfile.ZipInfo(f"{i:04}"), data, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()
