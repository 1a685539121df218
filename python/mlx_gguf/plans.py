"""Plans that ``mlx-gguf tune`` found for this machine: storing them, and loading them.

One JSON file in the user's cache holds them for every device and version that was tuned.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

from . import _ext
from ._abi import VERSION

__all__ = ["cache_dir", "device_name", "load", "plans_file", "store"]


def cache_dir() -> Path:
    """Where this package keeps files it can make again."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mlx-gguf"
    caches = Path("Library/Caches") if sys.platform == "darwin" else Path(".cache")
    return Path.home() / caches / "mlx-gguf"


def plans_file() -> Path:
    """Where plans are stored."""
    return cache_dir() / "plans.json"


def device_name(backend: str) -> str:
    """The name of a backend's device: what a plan's speed depends on."""
    import mlx.core as mx

    device = mx.cpu if backend == "cpu" else mx.gpu
    name = str(mx.device_info(device).get("device_name") or platform.processor())
    return f"{name} ({_ext.cpu_isa()})" if backend == "cpu" else name


def _key(backend: str) -> dict[str, str]:
    return {
        "backend": backend,
        "device": device_name(backend),
        "mlx": _ext.running_mlx,
        "mlx_gguf": VERSION,
    }


def store(backend: str, products: list[dict[str, Any]]) -> Path:
    """Store plans for this machine's device, beside those stored for it before.

    Parameters
    ----------
    backend : str
    products : list of dict
        Arguments of ``_ext.set_plans`` but the backend.

    Returns
    -------
    Path
        The file.
    """
    path, key = plans_file(), _key(backend)
    try:
        devices = json.loads(path.read_text())["devices"]
        before = [p for d in devices if _matches(d, key) for p in d["products"]]
        merged = {_identity(product): product for product in [*before, *products]}
        devices = [d for d in devices if not _matches(d, key)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # None, or not worth keeping.
        devices, merged = [], {_identity(product): product for product in products}
    devices.append(key | {"products": list(merged.values())})
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place and then renamed, so that nobody ever reads half of it.
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps({"devices": devices}, indent=1) + "\n")
    os.replace(scratch, path)
    return path


def load() -> None:
    """Put the stored plans for this machine's devices to use; importing the package does.

    ``MLX_GGUF_TUNED=0`` in the environment turns it off. A file that does not make sense is
    a warning.
    """
    if os.environ.get("MLX_GGUF_TUNED") == "0":
        return
    path = plans_file()
    if not path.exists():
        return
    try:
        keys: dict[str, dict[str, str]] = {}
        for device in json.loads(path.read_text())["devices"]:
            backend = device["backend"]
            if device["mlx"] != _ext.running_mlx or backend not in _ext.backends():
                continue
            if _matches(device, keys.setdefault(backend, _key(backend))):
                for product in device["products"]:
                    plans = {int(rows): plan for rows, plan in product["plans"].items()}
                    _ext.set_plans(backend, **(product | {"plans": plans}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        _ext.clear_plans()
        warnings.warn(
            f"[tuned] Expected plans that `mlx-gguf tune` stored in '{path}'. Received "
            f"{type(error).__name__}: {error}; none of them is used.",
            RuntimeWarning,
            stacklevel=2,
        )


def _matches(device: dict[str, Any], key: dict[str, str]) -> bool:
    return all(device.get(name) == value for name, value in key.items())


def _identity(product: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(product[name] for name in ("qtype", "dtype", "N", "K"))
