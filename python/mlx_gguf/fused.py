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

    Layers keep their parameters; when one gets another weight, its group is no more. Layers with
    biases, and those that are alone of their type among their siblings, stay as they are.

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
    by_kind: dict[tuple[str, int], list[QuantLinear]] = {}
    for layer in layers:
        if type(layer) is QuantLinear and "bias" not in layer and layer._part is None:
            weight = layer["weight"]
            if weight.dtype == mx.uint8 and weight.nbytes % _ALIGNMENT == 0:
                by_kind.setdefault((layer.qtype, weight.shape[1]), []).append(layer)
    return (group for group in by_kind.values() if len(group) > 1)


class _Group:
    """Layers on one weight, and the product that was made last if it is not yet handed out."""

    def __init__(self, layers: list[QuantLinear]):
        ends = list(accumulate(layer["weight"].shape[0] for layer in layers))
        self.weight = mx.concatenate([layer["weight"] for layer in layers])
        self.qtype = layers[0].qtype
        self.ends = ends[:-1]
        self.layers = layers
        # Replaced as a whole: threads that run the model at once at worst make it again.
        self.made: _Made | None = None
        rows = [self.weight[a:b] for a, b in zip([0, *self.ends], ends, strict=True)]
        mx.eval(self.weight, rows)
        for i, (layer, part) in enumerate(zip(layers, rows, strict=True)):
            layer.weight = part
            layer._part = _Part(self, i)

    def dissolve(self) -> None:
        for layer in self.layers:
            layer._part = None
        self.made = None


class _Made:
    """A product, by its input and its parts not yet taken."""

    def __init__(self, x: mx.array, parts: list[mx.array | None]):
        self.x, self.parts, self.left = x, parts, len(parts)


class _Part:
    """A layer's place in a group."""

    def __init__(self, group: _Group, index: int):
        self.group, self.index = group, index

    def __call__(self, x: mx.array) -> mx.array | None:
        """The layer's product with x, or None where it has to make its own."""
        group, index = self.group, self.index
        made = group.made
        if made is None or made.x is not x or made.parts[index] is None:
            if x.ndim == 0 or x.size > _MOST_ROWS * x.shape[-1]:
                return None
            y = _ext.quantized_matmul(x, group.weight, group.qtype)
            made = group.made = _Made(x, mx.split(y, group.ends, -1))
        part, made.parts[index] = made.parts[index], None
        made.left -= 1
        if made.left == 0:
            group.made = None
        return part

    def dissolve(self) -> None:
        self.group.dissolve()
