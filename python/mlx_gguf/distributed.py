"""Tensor parallelism on packed weights, by MLX's own functions.

``mlx.nn.layers.distributed.shard_linear`` and ``shard_inplace``, and with them
the ``shard`` method of mlx-lm's models, take our layers once this package is
imported. Rows are cut anywhere and stay on the mapped file; columns are cut on
block borders and are a copy of the rank's share. In a GPU's own memory both are copies.

>>> model, tokenizer = gg.load("model.gguf")
>>> model.shard(mx.distributed.init())
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers import distributed
from mlx.utils import tree_flatten, tree_unflatten

from . import _ext
from .nn import QuantLinear, _format, _Packed

__all__ = ["QuantAllToShardedLinear", "QuantShardedToAllLinear"]

Segments = int | list[int] | list[float]


def _spans(size: int, segments: Segments, unit: int, group: Any) -> list[tuple[int, int]]:
    """A rank's part of every segment of an axis, both ends in multiples of `unit`."""
    if isinstance(segments, int):
        borders = [size * i // segments for i in range(segments + 1)]
    else:  # positions as mx.split takes them, or fractions of the size
        borders = [0, *(s if isinstance(s, int) else int(s * size) for s in segments), size]
    ranks, rank = group.size(), group.rank()
    spans = []
    for begin, end in pairwise(borders):
        part, rest = divmod(end - begin, ranks)
        if rest or part % unit or begin % unit or part <= 0:
            whole = f"blocks of {unit}" if unit > 1 else "rows"
            raise ValueError(
                f"[shard] Expected segments of {size} that {ranks} ranks can share in whole "
                f"{whole}. Received one from {begin} to {end}."
            )
        spans.append((begin + rank * part, begin + (rank + 1) * part))
    return spans


def _share(weight: mx.array, qtype: str, axis: int, segments: Segments, group: Any) -> mx.array:
    """A rank's share of packed weights along the axis of N (-2), of K (-1) or of experts."""
    axis %= weight.ndim
    size, unit, unit_bytes = weight.shape[axis], 1, 1
    if axis == weight.ndim - 1 and weight.dtype == mx.uint8:
        fmt = _format("shard", qtype)
        unit, unit_bytes = fmt.block_size, fmt.block_bytes
        size = size // unit_bytes * unit
    outer = (slice(None),) * axis
    parts = [
        weight[(*outer, slice(begin // unit * unit_bytes, end // unit * unit_bytes))]
        for begin, end in _spans(size, segments, unit, group)
    ]
    if len(parts) == 1 and axis == 0 and not _ext.has_cuda():
        return parts[0]  # rows one after the other, where they lie in the file
    share = mx.contiguous(mx.concatenate(parts, axis=axis))
    # Now, tensor by tensor, so that the rest of the file need not be in memory.
    mx.eval(share, weight)
    _ext.release_pages(weight)
    return share


_shard_plain = distributed._shard


def _shard(parameters: dict, sharding_predicate: Callable, group: Any = None) -> Any:
    """MLX's function of this name, for trees that may hold packed layers."""
    group = group or mx.distributed.init()
    flat: Any = tree_flatten(parameters)
    types = {
        path.removesuffix("ggml_type") + "weight": code
        for path, code in flat
        if path.rpartition(".")[2] == "ggml_type"
    }
    if not types:
        return _shard_plain(parameters, sharding_predicate, group)
    shares = []
    for path, value in flat:
        if path.rpartition(".")[2] == "ggml_type":
            shares.append((path, value))
        elif path in types:
            choice = sharding_predicate(path, value)
            if choice is not None:
                axis, segments = choice if isinstance(choice, tuple) else (choice, 1)
                found = _ext.find_format(types[path].item())
                assert found is not None  # a layer takes no other type
                value = _share(value, found.name, axis, segments, group)
            shares.append((path, value))
        else:
            shares.append((path, _shard_plain({path: value}, sharding_predicate, group)[path]))
    return tree_unflatten(shares)


class _Sharded(_Packed):
    """A rank's share of a QuantLinear."""

    _sharding: str

    @classmethod
    def from_quant_linear(
        cls, layer: QuantLinear, *, segments: Segments = 1, group: Any = None
    ) -> Any:
        """Cut a layer.

        Parameters
        ----------
        layer : QuantLinear
        segments : int or list
            As of ``shard_linear``; list entries count rows (N) of an all-to-sharded
            layer and inputs (K) of a sharded-to-all one.
        group : mlx.core.distributed.Group, optional
            Default: the global group.

        Raises
        ------
        ValueError
            The ranks cannot share N evenly, or K in whole blocks.
        """
        group = group or mx.distributed.init()
        predicate = {
            "all-to-sharded": distributed._all_to_sharded,
            "sharded-to-all": distributed._sharded_to_all,
        }[cls._sharding](segments)
        share = _shard(layer.parameters(), predicate, group)
        out = cls.__new__(cls)
        _Packed.__init__(out, share["weight"], layer.qtype)
        if "bias" in share:
            out.bias = share["bias"]
        out.group = group
        return out

    def _extra_repr(self) -> str:
        N, K = self._logical_shape()
        rows = self._sharding == "all-to-sharded"
        ranks = self.group.size()
        return (
            f"input_dims={K if rows else K * ranks}, output_dims={N * ranks if rows else N}, "
            f"bias={'bias' in self}, qtype={self.qtype}"
        )


class QuantAllToShardedLinear(_Sharded):
    """``nn.AllToShardedLinear`` on packed weights: every rank has some of the N rows.

    Inputs ``[..., K]`` give outputs ``[..., N / ranks]`` in the input's dtype; the
    gradient in the input is summed over the ranks.
    """

    _sharding = "all-to-sharded"

    def __call__(self, x: mx.array) -> mx.array:
        return QuantLinear.__call__(self, distributed.sum_gradients(self.group)(x))  # type: ignore[arg-type]


class QuantShardedToAllLinear(_Sharded):
    """``nn.ShardedToAllLinear`` on packed weights: every rank has some of the K columns.

    Inputs ``[..., K / ranks]`` give the sum over all ranks, ``[..., N]``, in the
    input's dtype; the bias is added after the sum.
    """

    _sharding = "sharded-to-all"

    def __call__(self, x: mx.array) -> mx.array:
        y = _ext.quantized_matmul(x, self["weight"], self.qtype)
        y = mx.distributed.all_sum(y, group=self.group)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y


def _take_ours(theirs: Any, ours: type[_Sharded]) -> None:
    """Let a class that shard_linear makes of layers it takes for quantised ones know ours."""
    make = theirs.from_quantized_linear

    def from_quantized_linear(cls: Any, layer: Any, *, segments: Segments = 1, group: Any = None):
        if isinstance(layer, QuantLinear):
            return ours.from_quant_linear(layer, segments=segments, group=group)
        return make.__func__(cls, layer, segments=segments, group=group)

    theirs.from_quantized_linear = classmethod(from_quantized_linear)


# Models hold references to MLX's two functions, so what these call is replaced.
distributed._shard = _shard
_take_ours(distributed.QuantizedAllToShardedLinear, QuantAllToShardedLinear)
_take_ours(distributed.QuantizedShardedToAllLinear, QuantShardedToAllLinear)
