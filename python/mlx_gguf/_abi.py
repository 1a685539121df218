"""The check that MLX here is the MLX the extension was built against."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path

VERSION = metadata.version("mlx-gguf")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _required() -> str:
    """The mlx version that this package's metadata asks for."""
    for requirement in metadata.requires("mlx-gguf") or []:
        if requirement.startswith("mlx=="):
            return requirement.removeprefix("mlx==").split(";")[0].strip()
    return "unknown"


def check() -> None:
    """Raise ImportError, in one sentence, unless the extension fits MLX."""
    want, have = _required(), _installed("mlx")
    if have != want:
        raise ImportError(
            f"[mlx_gguf] Expected mlx {want}, which the extension was built against. Received "
            f"mlx {have}; run: pip install 'mlx=={want}', or rebuild mlx-gguf against mlx {have}."
        )
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"[mlx_gguf] Expected mlx {want} with a backend. Received one that does not load "
            f"({error}); run: pip install 'mlx-gguf[cpu]', or 'mlx-gguf[cuda13]' on NVIDIA."
        ) from error
    from . import _ext

    if not _ext.shares_mlx_types:
        raise ImportError(
            f"[mlx_gguf] Expected an mlx {want} built with nanobind "
            f"{_ext.built_with_nanobind}'s ABI. Received mlx {_ext.running_mlx} with another; "
            f"run: pip install --force-reinstall 'mlx=={want}' mlx-gguf."
        )


def load_cuda() -> str | None:
    """Load the CUDA backend where MLX has CUDA and a device; it makes no stream.

    Returns
    -------
    str or None
        Why there is none, for people. That it does not load where all is there is also a
        warning: everything else works without it.
    """
    import mlx.core as mx

    from . import _ext

    backend = Path(__file__).with_name("_cuda.so")
    if not mx.cuda.is_available():
        return "this machine's MLX has no CUDA"
    if not backend.exists():
        return "this build of mlx-gguf has no CUDA kernels"
    try:
        _ext.load_cuda(str(backend))
    except RuntimeError as error:
        warnings.warn(f"{error} Nothing runs on the GPU.", RuntimeWarning, stacklevel=2)
        return str(error)
    return None


check()
CUDA_PROBLEM = load_cuda()
