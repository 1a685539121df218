"""Layers that read one input, such as q, k and v, as one product.

A matrix of 1,024 rows is too short to keep a GPU's memory busy, and every launch costs the host
microseconds; a token of a model with 32 layers takes 225 products, or 129 when q, k, v and gate,
up are one each. :func:`fuse` puts the weights of such layers of one type one after the other in
memory, in the file's own bytes, and each layer's ``weight`` becomes its rows of the whole. The
first layer that is called with an input makes the product for all of them; the others hand out
their part of it.

:func:`mlx_gguf.load` calls it if the default device is a GPU with CUDA, where tensors are copied
to the device in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from threading import get_ident
from typing import Any

import mlx.core as mx

from . import _ext
from .nn import QuantLinear

__all__ = ["fuse"]

# What mlx-lm's modules call layers of one input.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
_MOST_ROWS = 8  # of x, which a gemv serves; parts of more are no rows in memory
_ALIGNMENT = 16  # of each layer's rows, as CUDA's copies want it


def fuse(model: Any) -> int:
    """Fuse the layers of a model that read one input.

    Layers keep their parameters; when one gets another weight or bias, its group is no more.
    Layers that are alone of their type among their siblings, or alone with a bias, stay as they
    are.

    Parameters
    ----------
    model : mlx.nn.Module

    Returns
    -------
    int
        The number of products that are saved for each row of activations.
    """
    saved = 0
    for module in model.modules():
        for names in _SIBLINGS:
            for layers in _alike([module[name] for name in names if name in module]):
                _Group(layers)
                saved += len(layers) - 1
    return saved


def _alike(layers: list[Any]) -> Iterator[list[QuantLinear]]:
    """The layers by what one product can have."""
    by_kind: dict[tuple[str, int, mx.Dtype | None], list[QuantLinear]] = {}
    for layer in layers:
        if type(layer) is QuantLinear and layer._part is None:
            weight = layer["weight"]
            bias = layer["bias"].dtype if "bias" in layer else None
            if weight.dtype == mx.uint8 and weight.nbytes % _ALIGNMENT == 0:
                by_kind.setdefault((layer.qtype, weight.shape[1], bias), []).append(layer)
    return (group for group in by_kind.values() if len(group) > 1)


class _Group:
    """Layers on one weight, and on one bias if they have some."""

    def __init__(self, layers: list[QuantLinear]):
        ends = list(accumulate(layer["weight"].shape[0] for layer in layers))
        self.weight = mx.concatenate([layer["weight"] for layer in layers])
        self.bias = None
        if "bias" in layers[0]:
            self.bias = mx.concatenate([layer["bias"] for layer in layers])
        self.qtype = layers[0].qtype
        self.ends = ends[:-1]
        self.layers = layers
        self.parts = [_Part(self) for _ in layers]
        for layer, begin, end in zip(layers, [0, *self.ends], ends, strict=True):
            layer.weight = self.weight[begin:end]
            if self.bias is not None:
                layer.bias = self.bias[begin:end]
        mx.eval(self.weight, self.bias, [layer.parameters() for layer in layers])
        for layer, part in zip(layers, self.parts, strict=True):
            layer._part = part

    def make(self, x: mx.array) -> list[mx.array]:
        """The product with x, of which every layer gets its part when it is called."""
        thread = get_ident()
        made = _ext.quantized_matmul_parts(x, self.weight, self.qtype, self.ends, self.bias)
        for part, y in zip(self.parts, made, strict=True):
            part.ready[thread] = (x, y)
        return made


class _Part:
    """A layer's place in a group.

    Attributes
    ----------
    ready : dict
        By thread, an input and the layer's product with it, made when another layer was called
        with that very array. A thread never lets go of another's: parts of a product refer to each
        other, and MLX's way to part them is not safe while their thread evaluates them.
    """

    __slots__ = ("group", "ready")

    def __init__(self, group: _Group):
        self.group = group
        self.ready: dict[int, tuple[mx.array, mx.array]] = {}

    def take(self, x: mx.array) -> mx.array | None:
        """The product with x if another layer's call has made it."""
        ready = self.ready.pop(get_ident(), None)
        return ready[1] if ready is not None and ready[0] is x else None

    def make(self, x: mx.array) -> mx.array | None:
        """Make the product for all layers; None where each has to make its own."""
        if x.ndim == 0 or x.size > _MOST_ROWS * x.shape[-1]:
            return None
        y = self.group.make(x)[self.group.parts.index(self)]
        del self.ready[get_ident()]
        return y

    def dissolve(self) -> None:
        """Leave every layer of the group to itself."""
        for layer in self.group.layers:
            layer._part = None
