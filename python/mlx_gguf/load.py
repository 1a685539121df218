"""From a GGUF file to what ``mlx_lm.load`` returns."""

from __future__ import annotations

import importlib
import os
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten, tree_unflatten

from . import _ext, cpu_fast
from .ahead import compile_ahead
from .file import GGUFFile, TensorInfo
from .file import open as open_gguf
from .fused import fuse
from .models import find_architecture
from .models.base import Architecture, Keys
from .models.sharding import shard_own_modules
from .nn import QuantEmbedding, QuantLinear, QuantSwitchLinear
from .progress import Progress

_DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def load(
    path: str | os.PathLike[str],
    *,
    dtype: mx.Dtype | None = None,
    group: mx.distributed.Group | None = None,
) -> tuple[Any, Any]:
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
    group : mlx.core.distributed.Group, optional
        Shard the model, as ``model.shard(group)`` does. Of tensors that are cut
        a rank then keeps its share alone, also where they are copied to a GPU.

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
        An architecture, pre-tokenizer, tensor or parameter that does not fit,
        or a model that `group` cannot share; the message names it.
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
    return load_model(file, dtype=dtype, group=group), load_tokenizer(file.metadata)


def load_model(
    file: GGUFFile,
    *,
    dtype: mx.Dtype | None = None,
    group: mx.distributed.Group | None = None,
) -> Any:
    """Build the model of an open file; see :func:`load`."""
    arch = find_architecture(file.architecture, file.path)
    _check_whole(file)
    if dtype is None:
        dtype = default_dtype(arch)
    elif dtype not in _DTYPES:
        raise ValueError(f"[load] Expected dtype float16, bfloat16 or float32. Received {dtype}.")
    keys = Keys(file)
    classes = importlib.import_module(f"mlx_lm.models.{arch.module}")
    config = {"model_type": arch.module, **arch.config(keys, file)}
    try:
        model = classes.Model(classes.ModelArgs.from_dict(config))
    except (ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"[load] Expected sizes of a model in the metadata of {file.path!r}. Received {config}."
        ) from error
    if arch.finish:
        arch.finish(model, keys, file)
    shard_own_modules(model)
    shared = group is not None and group.size() > 1
    if shared and not hasattr(model, "shard"):
        raise ValueError(
            f"[load] Expected an architecture that mlx-lm can shard. Received {arch.name}."
        )
    with Progress(f"loading {file.path}") as progress:
        _fill(model, file, arch, dtype, progress, later=shared)
        if shared:
            model.shard(group)
    model.eval()
    mx.eval(model.parameters())
    on_cpu = mx.default_device().type == mx.cpu
    if on_cpu or _ext.has_cuda():
        from . import gated_delta

        gated_delta.install()
    if on_cpu:
        cpu_fast.install()
    elif _ext.has_cuda():
        fuse(model)
        if os.environ.get("MLX_GGUF_CUDA_STEP") != "0":
            from .step import install

            install(model)
        with Progress("compiling kernels"):
            compile_ahead(model, dtype)
    return model


def _check_whole(file: GGUFFile) -> None:
    """Refuse the draft head that some models have in a file of its own (``mtp-*.gguf``)."""
    blocks = [name for name in file.tensors if name.startswith("blk.")]
    if blocks and not any(name.startswith("blk.0.") for name in blocks):
        raise ValueError(
            f"[load] Expected a language model with all its layers in {file.path!r}. Received "
            f"tensors from {blocks[0]} on without any of blk.0: a draft head (MTP), which goes "
            "with a language model's file."
        )


def default_dtype(arch: Architecture) -> mx.Dtype:
    """The activations' dtype on the default device."""
    if mx.default_device().type == mx.cpu:
        return mx.float32
    return mx.float16 if arch.half_range else mx.bfloat16


def _fill(
    model: Any,
    file: GGUFFile,
    arch: Architecture,
    dtype: mx.Dtype,
    progress: Progress,
    later: bool,
) -> None:
    """Put every tensor of the file into the model; nothing may be left on either side."""
    parameters: Any = tree_flatten(model.parameters())
    expected = {name: parameter.shape for name, parameter in parameters}
    modules: dict[str, Any] = dict(model.named_modules())
    layers: dict[str, Any] = {}
    arrays: dict[str, mx.array] = {}
    total, done = sum(info.nbytes for info in file.tensors.values()), 0
    for info in file.tensors.values():
        done += info.nbytes
        if _ext.has_cuda() and not later:  # each tensor is copied to the device, in one piece
            progress.show(f"loading {file.path}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        if info.name in arch.extras or arch.is_draft(info.name, len(model.layers)):
            continue
        choices = arch.places(info.name)
        names = next((c for c in choices if all(name in expected for name in c)), None)
        if names is None:
            raise ValueError(
                f"[load] Expected every tensor of {file.path!r} to be used. Received "
                f"{info.name} {info.shape}, which {arch.name} has no place for."
            )
        sizes = [expected.pop(name) for name in names]
        array = file._array(info.name, later)
        if order := arch.row_order(info.name):
            array = order(model, array)
        for name, size, part in zip(names, sizes, _parts(array, sizes), strict=True):
            owner, _, leaf = name.rpartition(".")
            layer = _packed_layer(modules[owner], part, info, dtype) if leaf == "weight" else None
            if layer is not None:
                layers[owner] = layer
                shape = layer._logical_shape()
            else:
                arrays[name] = _small(part, info, name, arch, dtype)
                shape = arrays[name].shape
            if shape != size:
                raise ValueError(
                    f"[load] Expected {info.name} to fit {name} of {arch.name}, {size}. Received "
                    f"shape {info.shape}."
                )
    if expected:
        raise ValueError(
            f"[load] Expected a tensor for every parameter of {arch.name}. Received {file.path!r} "
            f"without {', '.join(sorted(expected))}."
        )
    model.update_modules(tree_unflatten(list(layers.items())))
    for name, array in arrays.items():
        owner, _, leaf = name.rpartition(".")
        layers.get(owner, modules[owner])[leaf] = array


def _parts(array: mx.array, sizes: list[tuple[int, ...]]) -> list[mx.array]:
    """Cut the rows for several parameters; the last one takes the rest, to be checked."""
    ends = [sum(size[0] for size in sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return [array[start:end] for start, end in zip([0, *ends], [*ends, None], strict=True)]


def _packed_layer(module: Any, array: mx.array, info: TensorInfo, dtype: mx.Dtype) -> Any | None:
    """Our layer in place of one of MLX's, or None where a plain array belongs."""
    from mlx_lm.models.switch_layers import SwitchLinear

    if isinstance(module, mlx.nn.Linear):
        # A single row may be written as a vector.
        return QuantLinear.from_packed(array[None] if array.ndim == 1 else array, info.qtype)
    if isinstance(module, mlx.nn.Embedding):
        return QuantEmbedding.from_packed(array, info.qtype, dtype)
    if isinstance(module, SwitchLinear):
        return QuantSwitchLinear.from_packed(array, info.qtype)
    return None


def _small(
    array: mx.array, info: TensorInfo, name: str, arch: Architecture, dtype: mx.Dtype
) -> mx.array:
    """A norm, bias or the like: plain numbers, transformed in float32 and then cast."""
    if info.qtype not in ("f32", "f16", "bf16"):
        raise ValueError(
            f"[load] Expected plain numbers for {name}. Received {info.name} of type {info.qtype}."
        )
    for suffix, transform in arch.transforms.items():
        if name.endswith(suffix):
            array = transform(array)
    return array.astype(mx.float32 if name.endswith(tuple(arch.float32)) else dtype)
