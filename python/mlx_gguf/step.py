"""A token's way through all layers of a model as one operation of the graph.

A token of a model with 32 layers is some 450 operations. On a fast GPU the host takes longer to
build, order and launch them than the GPU to run them. :func:`install` gives mlx-lm's llama, qwen2
and qwen3 models, mistral among them, a way around most of that: for one token of one sequence all
layers and the last norm are one operation, which launches eight kernels a layer.

The layers are called as before for everything else: prompts, batches, other caches than
``KVCache``, layers that were replaced (LoRA, sharding) or got other weights since, function
transformations, and the token that fills an empty cache. Results differ by rounding: between two
products they are rounded less often.

The steps write keys and values in place, into memory of their own, so they borrow the arrays of
the caches. Whoever asks a cache for its ``keys`` or ``values`` (another prompt, saving, copying,
quantising) takes them back, and the next step borrows a copy.

:func:`mlx_gguf.load` calls it if the default device is a GPU with CUDA; ``MLX_GGUF_CUDA_STEP=0``
in the environment leaves it out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.cache import KVCache

from . import _ext
from .models.llama import DividedRope
from .nn import QuantLinear

__all__ = ["install"]

# mlx-lm's classes of the same three names in each of these modules.
_MODULES = ("llama", "qwen2", "qwen3")
_PLAIN_ROPES = (rope_utils.Llama3RoPE, rope_utils.ProportionalRoPE, DividedRope)
_Watched = list[tuple[Any, Any, Any]]


def install(model: Any) -> bool:
    """Let a model take single tokens in one operation.

    Parameters
    ----------
    model : mlx.nn.Module
        A model of mlx-lm's with this package's layers. To be called after
        :func:`mlx_gguf.fused.fuse`, whose products it then uses.

    Returns
    -------
    bool
        Whether the model is of a kind for which there is such an operation, and did not have it.
    """
    body = getattr(model, "model", None)
    if body is None or _module_of(body) is None:
        return False
    try:
        stack, watched = _stack_of(body)
    except ValueError:
        return False
    mx.eval([value for _, _, value in watched if isinstance(value, mx.array)])
    body.__dict__["_stack"] = stack
    body.__dict__["_stacked"] = tuple(body["layers"])
    body.__dict__["_watched"] = watched
    body.__class__ = _stepping(type(body))
    return True


def _need(condition: bool) -> None:
    """As the operation itself, refuse what is not made of the parts that it knows."""
    if not condition:
        raise ValueError


# A model's body


def _module_of(body: Any) -> Any:
    """The module of mlx-lm that has the class of a body, if it is one of those known here."""
    name = type(body).__module__.rpartition(".")[2]
    if type(body).__module__ == f"mlx_lm.models.{name}" and name in _MODULES:
        return importlib.import_module(type(body).__module__)
    return None


def _stack_of(body: Any) -> tuple[_ext.Stack, _Watched]:
    """The layers as the operation has them, and what may not change for it to stay right."""
    classes = _module_of(body)
    layers = body["layers"]
    _need(bool(layers) and type(body["norm"]) is nn.RMSNorm)
    for layer in layers:
        _need(type(layer) is classes.TransformerBlock)
        _need(type(layer.self_attn) is classes.Attention and type(layer.mlp) is classes.MLP)
    first = layers[0].self_attn
    heads, kv_heads = first.n_heads, first.n_kv_heads
    head_dim = _rows(first["q_proj"]) // heads
    watched: _Watched = [(body, "norm", body["norm"])]
    watched.append((body["norm"], "weight", body["norm"]["weight"]))
    stack = _ext.Stack(
        body["norm"]["weight"],
        inner=_rows(layers[0].mlp["gate_proj"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=body["norm"].eps,
        scale=first.scale,
        **_rope(first.rope),
    )
    for layer in layers:
        attention = layer.self_attn
        _need((attention.n_heads, attention.n_kv_heads) == (heads, kv_heads))
        _need(attention.scale == first.scale and _rope(attention.rope) == _rope(first.rope))
        _need(not getattr(layer, "use_sliding", False))
        _add_layer(stack, layer, body["norm"].eps, watched)
    return stack, watched


def _add_layer(stack: _ext.Stack, layer: Any, eps: float, watched: _Watched) -> None:
    def child(owner: Any, name: str, kind: type) -> Any:
        module = owner[name]
        _need(type(module) is kind)
        watched.append((owner, name, module))
        watched.extend((module, key, module.get(key)) for key in ("weight", "bias"))
        return module

    def norm(owner: Any, name: str) -> Any:
        if name not in owner:
            return None
        module = child(owner, name, nn.RMSNorm)
        _need(module.eps == eps)
        return module["weight"]

    def linears(owner: Any, *names: str) -> list[Any]:
        return [child(owner, name, QuantLinear) for name in names]

    attention, mlp = layer.self_attn, layer.mlp
    watched.extend([(layer, "self_attn", attention), (layer, "mlp", mlp)])
    qkv = linears(attention, "q_proj", "k_proj", "v_proj")
    plain = linears(attention, "o_proj") + linears(mlp, "gate_proj", "up_proj", "down_proj")
    _need(all("bias" not in linear for linear in plain))
    output, gate, up, down = plain
    _need([_rows(gate), _rows(up)] == [_rows(gate)] * 2)
    stack.add_layer(
        input_norm=norm(layer, "input_layernorm"),
        qkv=_products(qkv),
        q_norm=norm(attention, "q_norm"),
        k_norm=norm(attention, "k_norm"),
        output=_products([output])[0],
        mlp_norm=norm(layer, "post_attention_layernorm"),
        gate_up=_products([gate, up]),
        down=_products([down])[0],
    )


def _rows(linear: Any) -> int:
    _need(type(linear) is QuantLinear)
    return int(linear["weight"].shape[0])


def _products(linears: list[QuantLinear]) -> list[tuple[mx.array, str, mx.array | None]]:
    """Weights, types and biases, those of a group as one where its layers follow each other."""
    out = []
    while linears:
        group = linears[0]._part.group if linears[0]._part is not None else None
        if group is not None and _are(group.layers, linears[: len(group.layers)]):
            out.append((group.weight, group.qtype, group.bias))
            linears = linears[len(group.layers) :]
        else:
            first, *linears = linears
            out.append((first["weight"], first.qtype, first.get("bias", None)))
    return out


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the very same objects; modules would compare their arrays."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _rope(rope: Any) -> dict[str, Any]:
    """How fast each pair turns, in radians a position, and what is done to it beside that."""
    kind, gain = type(rope), 1.0
    traditional = kind is DividedRope or getattr(rope, "traditional", False)
    if kind is nn.RoPE:
        half = rope.dims // 2
        speeds = [rope.scale * math.pow(rope.base, -i / half) for i in range(half)]
        return {"traditional": traditional, "gain": gain, "speeds": speeds}
    if kind is rope_utils.YarnRoPE:
        gain = float(rope.mscale)
    elif kind is rope_utils.SuScaledRoPE:
        gain = float(rope._scale)
    else:
        _need(kind in _PLAIN_ROPES)
    speeds = [1.0 / period for period in rope._freqs.astype(mx.float32).tolist()]
    return {"traditional": traditional, "gain": gain, "speeds": speeds}


def _stepping(base: Any) -> Any:
    """A body's class with the operation in front of it."""

    class Stepping(base):  # type: ignore[misc]
        def __call__(
            self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
        ) -> mx.array:
            given = inputs if input_embeddings is None else input_embeddings
            tokens = given.size if input_embeddings is None else given.size // given.shape[-1]
            if tokens == 1 and cache:
                y = _step(self, inputs, cache, input_embeddings)
                if y is not None:
                    return y
            return super().__call__(inputs, cache, input_embeddings)

    Stepping.__name__, Stepping.__qualname__ = base.__name__, base.__qualname__
    return Stepping


def _step(
    body: Any, inputs: mx.array, caches: list[Any], embeddings: mx.array | None
) -> mx.array | None:
    if not _are(body["layers"], body._stacked) or len(caches) != len(body._stacked):
        return None
    if any(owner.get(key) is not value for owner, key, value in body._watched):
        return None
    if getattr(body, "pipeline_size", 1) > 1:
        return None
    if not all(isinstance(cache, KVCache) for cache in caches):
        return None
    x = body.embed_tokens(inputs) if embeddings is None else embeddings
    if x.dtype != body["norm"]["weight"].dtype:
        return None
    position = caches[0].offset
    loan = _loan_of(body._stack, caches, position)
    if loan is None:
        return None
    y = _ext.step(loan.history, x, position, loan.last)
    if y is None:
        return None
    loan.last = y
    for cache in caches:
        cache.offset = position + 1
    return y


# Caches


class _Loan:
    """Keys and values of a list of caches, while steps write to them.

    Attributes
    ----------
    stack, history
    last : array or None
        What the last step gave, on which every reader has to wait.
    """

    __slots__ = ("history", "last", "stack")

    def __init__(self, stack: _ext.Stack, history: _ext.History):
        self.stack = stack
        self.history = history
        self.last: mx.array | None = None


class _LentCache(KVCache):
    """A ``KVCache`` whose arrays are lent: again a plain one once somebody asks for them."""

    _place: tuple[_Loan, int]

    @property
    def keys(self) -> Any:
        return _take_back(self).keys

    @keys.setter
    def keys(self, value: Any) -> None:
        _take_back(self).keys = value

    @property
    def values(self) -> Any:
        return _take_back(self).values

    @values.setter
    def values(self, value: Any) -> None:
        _take_back(self).values = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _take_back(self).__reduce_ex__(protocol)

    def empty(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return self._place[0].history.nbytes


def _take_back(cache: Any) -> Any:
    loan, layer = cache._place
    keys, values = _ext.read_history(loan.history, layer, loan.last)
    del cache._place
    cache.__class__ = KVCache
    cache.keys, cache.values = keys, values
    return cache


def _loan_of(stack: _ext.Stack, caches: list[Any], position: int) -> _Loan | None:
    """The loan that all caches are in, or a new one with a copy of their arrays."""
    first = caches[0]
    loan = first._place[0] if type(first) is _LentCache else None
    if loan is not None and loan.stack is stack and position < loan.history.capacity:
        for layer, cache in enumerate(caches):
            if type(cache) is not _LentCache or cache._place != (loan, layer):
                break
            if cache.offset != position:
                return None
        else:
            return loan
    return _borrow(stack, caches, position)


def _borrow(stack: _ext.Stack, caches: list[Any], position: int) -> _Loan | None:
    for cache in caches:
        if type(cache) not in (KVCache, _LentCache) or cache.offset != position:
            return None
        if cache.empty():
            return None
    keys, values = [c.keys for c in caches], [c.values for c in caches]
    history = _ext.begin_history(stack, keys, values, position)
    if history is None:
        return None
    loan = _Loan(stack, history)
    for layer, cache in enumerate(caches):
        del cache.keys, cache.values
        cache.__class__ = _LentCache
        cache._place = (loan, layer)
    return loan
