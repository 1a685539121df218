"""Run GGUF models in MLX, on the file's own quantised bytes.

>>> import mlx.core as mx, mlx_gguf as gg
>>> f = gg.open("model.gguf")
>>> y = gg.quantized_matmul(x, f["blk.0.ffn_up.weight"], "q4_k")
>>> model, tokenizer = gg.load("model.gguf")
"""

from . import _abi  # isort: skip  # checks MLX before anything of it is used

from . import distributed, nn, plans
from ._ext import (
    Format,
    dequantize,
    find_format,
    formats,
    gather_qmm,
    quantized_addmm,
    quantized_matmul,
)
from .errors import (
    GGUFError,
    MalformedError,
    MissingKeyError,
    NotGGUFError,
    TruncatedError,
    UnsupportedTypeError,
    VersionError,
)
from .export import export_function, exporter, native_ops
from .file import GGUFFile, TensorInfo, open
from .load import load

__version__ = _abi.VERSION

plans.load()

__all__ = [
    "Format",
    "GGUFError",
    "GGUFFile",
    "MalformedError",
    "MissingKeyError",
    "NotGGUFError",
    "TensorInfo",
    "TruncatedError",
    "UnsupportedTypeError",
    "VersionError",
    "dequantize",
    "distributed",
    "export_function",
    "exporter",
    "find_format",
    "formats",
    "gather_qmm",
    "load",
    "native_ops",
    "nn",
    "open",
    "quantized_addmm",
    "quantized_matmul",
]
