"""mlx-lm's ``shard`` for models with modules of ours, which it would cut in the wrong places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import shard_inplace

from .experts import FusedSwitchGLU
from .qwen35 import TilingConv1d


def shard_own_modules(model: Any) -> None:
    """Give a model a ``shard`` that also cuts the modules we put into it, if there are any."""
    theirs = type(model)
    if hasattr(theirs, "shard") and any(
        _own_modules(layer) or _may_repeat_heads(layer) for layer in model.layers
    ):
        model.__class__ = type(theirs.__name__, (_Sharding, theirs), {})


def _own_modules(layer: Any) -> list[tuple[Any, str]]:
    """Owners and names of a layer's modules that mlx-lm does not know."""
    linear, experts = layer.get("linear_attn"), layer.mlp.get("switch_mlp")
    found = []
    if linear is not None and isinstance(linear.conv1d, TilingConv1d):
        found.append((layer, "linear_attn"))
    if isinstance(experts, FusedSwitchGLU):
        found.append((layer.mlp, "switch_mlp"))
    return found


def _may_repeat_heads(layer: Any) -> bool:
    """Whether mlx-lm repeats rows of k and v for ranks beyond their heads: a Qwen3.5 attention."""
    return hasattr(layer.get("self_attn"), "num_key_value_heads")


class _Sharding:
    """In front of one of mlx-lm's model classes."""

    def shard(self: Any, group: Any = None) -> None:
        """Cut the model's layers for tensor parallelism, in place.

        Parameters
        ----------
        group : mlx.core.distributed.Group, optional
            Default: the global group.

        Raises
        ------
        ValueError
            The ranks cannot share the heads, or the columns in whole blocks.
        """
        group = group or mx.distributed.init()
        held = []
        for layer in self.layers:
            if _may_repeat_heads(layer):
                _repeat_heads(layer.self_attn, group.size())
            for owner, name in _own_modules(layer):
                held.append((owner, name, owner[name]))
                if name == "linear_attn":
                    _shard_tiled(owner[name], group)
                    owner[name] = _small_delta_net(self.language_model.args, group.size())
                else:
                    _shard_fused(owner[name], group)
                    owner[name] = _small_experts(group.size())
        try:
            super().shard(group)  # type: ignore[misc]
        finally:
            for owner, name, module in held:
                owner[name] = module


def _repeat_heads(attention: Any, ranks: int) -> None:
    """One key and value head for every rank, where there are fewer."""
    heads = attention.num_key_value_heads
    if heads >= ranks:
        return
    if ranks % heads:
        raise ValueError(
            f"[shard] Expected ranks to be a multiple of the {heads} key and value heads, or fewer."
            f" Received {ranks}."
        )
    for projection in (attention.k_proj, attention.v_proj):
        for name in ("weight", "bias"):
            if name in projection:
                rows = projection[name]
                by_head = rows.reshape(heads, -1, *rows.shape[1:])
                projection[name] = mx.repeat(by_head, ranks // heads, 0).reshape(
                    -1, *rows.shape[1:]
                )
    attention.num_key_value_heads = ranks


def _shard_fused(experts: FusedSwitchGLU, group: Any) -> None:
    shard_inplace(experts.gate_up_proj, "all-to-sharded", segments=2, group=group)
    shard_inplace(experts.down_proj, "sharded-to-all", group=group)


def _shard_tiled(layer: Any, group: Any) -> None:
    """Cut a GatedDeltaNet: a rank gets some key heads and, of every repeat, their value heads."""
    ranks, heads, repeats = group.size(), layer.conv1d.key_heads, layer.conv1d.repeats
    if heads % ranks:
        raise ValueError(
            f"[shard] Expected key heads that {ranks} ranks can share. Received {heads}."
        )
    keys, values = heads * layer.head_k_dim, heads * layer.head_v_dim
    parts = [keys, 2 * keys, *(2 * keys + i * values for i in range(1, repeats))]
    shard_inplace(layer.in_proj_qkv, "all-to-sharded", segments=parts, group=group)
    for projection in (layer.in_proj_z, layer.in_proj_a, layer.in_proj_b):
        shard_inplace(projection, "all-to-sharded", segments=repeats, group=group)
    shard_inplace(layer.out_proj, "sharded-to-all", segments=repeats, group=group)
    shard_inplace(layer.conv1d, lambda path, w: (0, parts), group=group)
    for name in ("dt_bias", "A_log"):
        shares = layer[name].reshape(repeats, ranks, -1)
        layer[name] = mx.contiguous(shares[:, group.rank()].flatten())
    for size in ("num_v_heads", "num_k_heads", "value_dim", "key_dim", "conv_dim"):
        setattr(layer, size, getattr(layer, size) // ranks)
    conv = TilingConv1d(
        layer.conv_dim, layer.conv_kernel_size, heads // ranks, repeats, layer.head_k_dim
    )
    conv.weight = layer.conv1d.weight
    layer.conv1d = conv
    layer.sharding_group = group


# What mlx-lm cuts in the place of a module that is cut already.


def _small_delta_net(args: Any, ranks: int) -> Any:
    from mlx_lm.models.qwen3_5 import GatedDeltaNet

    heads = {"linear_num_value_heads": ranks, "linear_num_key_heads": ranks}
    sizes = {"linear_key_head_dim": 1, "linear_value_head_dim": 1, "linear_conv_kernel_dim": 1}
    return GatedDeltaNet(replace(args, hidden_size=1, **heads, **sizes))


def _small_experts(ranks: int) -> Any:
    from mlx_lm.models.switch_layers import SwitchGLU

    return SwitchGLU(1, ranks, 1)
