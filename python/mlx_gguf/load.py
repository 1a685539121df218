"""From a GGUF file to what ``mlx_lm.load`` returns."""

from __future__ import annotations

import importlib
import os
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten, tree_unflatten

from .file import GGUFFile, TensorInfo
from .file import open as open_gguf
from .models import find_architecture
from .models.base import Architecture, Keys
from .nn import QuantEmbedding, QuantLinear, QuantSwitchLinear

_DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def load(path: str | os.PathLike[str], *, dtype: mx.Dtype | None = None) -> tuple[Any, Any]:
    """Load a GGUF file as an mlx-lm model and tokenizer.

    The model is mlx-lm's own class with its linear, embedding and expert layers
    replaced by :mod:`mlx_gguf.nn`'s, on weights that stay in the mapped file.

    Parameters
    ----------
    path : str or path-like
        A ``.gguf`` file; any shard of a split set.
    dtype : Dtype, optional
        Of activations, norms and biases: float16, bfloat16 or float32. The
        default is float32 on the CPU; on a GPU float16 for architectures whose
        activations fit its range (llama), bfloat16 for the others.

    Returns
    -------
    (mlx.nn.Module, mlx_lm.tokenizer_utils.TokenizerWrapper)
        As ``mlx_lm.load``, for ``mlx_lm.generate``, ``stream_generate``,
        ``batch_generate``, prompt caches and the server.

    Raises
    ------
    ImportError
        mlx-lm is not installed (extra ``lm``).
    GGUFError
        The file is refused; see :func:`mlx_gguf.open`.
    ValueError
        An architecture, pre-tokenizer, tensor or parameter that does not fit;
        the message names it.
    """
    try:
        import mlx_lm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "[load] Expected mlx-lm, which has the models. Received an environment without it; "
            "run: pip install 'mlx-gguf[lm]'."
        ) from error
    from .tokenizer import load_tokenizer

    file = open_gguf(path)
    return load_model(file, dtype=dtype), load_tokenizer(file.metadata)


def load_model(file: GGUFFile, *, dtype: mx.Dtype | None = None) -> Any:
    """Build the model of an open file; see :func:`load`."""
    arch = find_architecture(file.architecture, file.path)
    if dtype is None:
        dtype = default_dtype(arch)
    elif dtype not in _DTYPES:
        raise ValueError(
            f"[load] Expected dtype float16, bfloat16 or float32. Received {dtype}."
        )
    keys = Keys(file)
    classes = importlib.import_module(f"mlx_lm.models.{arch.module}")
    args = classes.ModelArgs.from_dict({"model_type": arch.module, **arch.config(keys, file)})
    model = classes.Model(args)
    if arch.finish:
        arch.finish(model, keys, file)
    _fill(model, file, arch, dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def default_dtype(arch: Architecture) -> mx.Dtype:
    """The activations' dtype on the default device."""
    if mx.default_device().type == mx.cpu:
        return mx.float32
    return mx.float16 if arch.half_range else mx.bfloat16


def _fill(model: Any, file: GGUFFile, arch: Architecture, dtype: mx.Dtype) -> None:
    """Put every tensor of the file into the model; nothing may be left on either side."""
    expected = {name: p.shape for name, p in tree_flatten(model.parameters())}
    modules = dict(model.named_modules())
    layers: dict[str, Any] = {}
    arrays: dict[str, mx.array] = {}
    for info in file.tensors.values():
        if info.name in arch.extras:
            continue
        name = arch.parameter(info.name)
        if name not in expected:
            raise ValueError(
                f"[load] Expected every tensor of {file.path!r} to be used. Received "
                f"{info.name} {info.shape}, which {arch.name} has no place for."
            )
        if info.shape != expected.pop(name):
            raise ValueError(
                f"[load] Expected {info.name} to fit {name} of {arch.name}. Received shape "
                f"{info.shape}."
            )
        owner, _, leaf = name.rpartition(".")
        layer = _packed_layer(modules[owner], file, info, dtype) if leaf == "weight" else None
        if layer is not None:
            layers[owner] = layer
        else:
            arrays[name] = _small(file, info, name, arch, dtype)
    if expected:
        raise ValueError(
            f"[load] Expected a tensor for every parameter of {arch.name}. Received {file.path!r} "
            f"without {', '.join(sorted(expected))}."
        )
    model.update_modules(tree_unflatten(list(layers.items())))
    for name, array in arrays.items():
        owner, _, leaf = name.rpartition(".")
        layers.get(owner, modules[owner])[leaf] = array


def _packed_layer(module: Any, file: GGUFFile, info: TensorInfo, dtype: mx.Dtype) -> Any | None:
    """Our layer in place of one of MLX's, or None where a plain array belongs."""
    from mlx_lm.models.switch_layers import SwitchLinear

    if isinstance(module, mlx.nn.Linear):
        return QuantLinear.from_packed(file[info.name], info.qtype)
    if isinstance(module, mlx.nn.Embedding):
        return QuantEmbedding.from_packed(file[info.name], info.qtype, dtype)
    if isinstance(module, SwitchLinear):
        return QuantSwitchLinear.from_packed(file[info.name], info.qtype)
    return None


def _small(
    file: GGUFFile, info: TensorInfo, name: str, arch: Architecture, dtype: mx.Dtype
) -> mx.array:
    """A norm or bias: plain numbers, transformed in float32 and then cast."""
    if info.qtype not in ("f32", "f16", "bf16"):
        raise ValueError(
            f"[load] Expected plain numbers for {name}. Received {info.name} of type {info.qtype}."
        )
    array = file[info.name]
    for suffix, transform in arch.transforms.items():
        if name.endswith(suffix):
            array = transform(array)
    return array.astype(dtype)
