"""A token's way through all layers of a model as one operation of the graph.

A token of a model with 32 layers is some 450 operations. On a fast GPU the host takes longer to
build, order and launch them than the GPU to run them. :func:`install` gives mlx-lm's llama, qwen2,
qwen3, qwen3_moe and qwen3_5 models, mistral among them, a way around most of that: for one token of
one sequence all layers and the last norm are one operation, which launches some eight kernels a
layer, or some fourteen with a mixture of experts.

The layers are called as before for everything else: prompts, batches, other caches than those that
the model makes, layers that were replaced (LoRA, sharding) or got other weights since, function
transformations, and the token that fills an empty cache. Results differ by rounding: between two
products they are rounded less often.

The steps write keys and values, or what a gated delta rule keeps, in place, into memory of their
own, so they borrow the arrays of the caches. Whoever asks a cache for them (another prompt, saving,
copying, quantising) takes them back, and the next step borrows a copy.

:func:`mlx_gguf.load` calls it if the default device is a GPU with CUDA; ``MLX_GGUF_CUDA_STEP=0``
in the environment leaves it out.
"""

from __future__ import annotations

import importlib
import math
from itertools import takewhile
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from . import _ext
from .models.experts import FusedSwitchGLU
from .models.llama import DividedRope
from .models.qwen35 import TilingConv1d
from .nn import QuantLinear, QuantSwitchLinear
from .step_caches import are, lend

__all__ = ["install"]

# mlx-lm's classes in each of these modules: of a layer, attention, an MLP, a mixture of experts.
_MODULES = {
    "llama": ("TransformerBlock", "Attention", "MLP", None),
    "qwen2": ("TransformerBlock", "Attention", "MLP", None),
    "qwen3": ("TransformerBlock", "Attention", "MLP", None),
    "qwen3_moe": ("Qwen3MoeDecoderLayer", "Attention", "MLP", "Qwen3MoeSparseMoeBlock"),
    "qwen3_5": ("DecoderLayer", "Attention", "MLP", "SparseMoeBlock"),
}
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
        told = _told_by(body["layers"])
    except ValueError:
        return False
    mx.eval([value for _, _, value in watched if isinstance(value, mx.array)])
    body.__dict__["_stack"] = stack
    body.__dict__["_stacked"] = tuple(body["layers"])
    body.__dict__["_watched"] = watched
    body.__dict__["_told"] = told
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
    module = _module_of(body)
    name = module.__name__.rpartition(".")[2]
    block, attention, *mlps = (getattr(module, kind) for kind in _MODULES[name] if kind)
    layers = body["layers"]
    _need(bool(layers) and type(body["norm"]) is nn.RMSNorm)
    for layer in layers:
        _need(type(layer) is block and type(layer.mlp) in mlps)
        _need(_is_linear(layer) or type(layer.self_attn) is attention)
    attends = [layer.self_attn for layer in layers if not _is_linear(layer)]
    _need(bool(attends))
    gated = name == "qwen3_5"
    heads, kv_heads = _heads(attends[0])
    rules = [_delta_sizes(layer.linear_attn) for layer in layers if _is_linear(layer)]
    mixtures = [layer.mlp for layer in layers if _is_mixture(layer)]
    kinds = [_expert_sizes(mixture) for mixture in mixtures]
    _need(rules == rules[:1] * len(rules) and kinds == kinds[:1] * len(kinds))
    dense = [layer.mlp for layer in layers if not _is_mixture(layer)]
    shared = [mixture.shared_expert for mixture in mixtures if "shared_expert" in mixture]
    _need(all(type(expert) is mlps[0] for expert in shared))
    dense += shared
    watched: _Watched = [(body, "norm", body["norm"])]
    watched.append((body["norm"], "weight", body["norm"]["weight"]))
    stack = _ext.Stack(
        _in_rows(body["norm"]["weight"]),
        inner=_rows(dense[0]["gate_proj"]) if dense else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_rows(attends[0]["q_proj"]) // (heads * (1 + gated)),
        gated=gated,
        eps=body["norm"].eps,
        scale=attends[0].scale,
        delta=rules[0] if rules else (0, 0, 0, 0, False),
        experts=kinds[0] if kinds else (0, 0, 0, False),
        **_rope(attends[0].rope),
    )
    for layer in layers:
        if not _is_linear(layer):
            own = layer.self_attn
            _need(_heads(own) == (heads, kv_heads) and own.scale == attends[0].scale)
            _need(_rope(own.rope) == _rope(attends[0].rope))
        _need(not getattr(layer, "use_sliding", False))
        _add_layer(stack, layer, body["norm"].eps, watched)
    return stack, watched


def _told_by(layers: list[Any]) -> _Watched:
    """Plain attributes that the operation was told of, which modules do not hold as items."""
    names = ("eps", "scale", "top_k", "norm_topk_prob", "sharding_group")
    return [
        (module, name, module.__dict__[name])
        for layer in layers
        for module in layer.modules()
        for name in names
        if name in module.__dict__
    ]


def _is_linear(layer: Any) -> bool:
    """Whether it is a gated delta rule."""
    return bool(getattr(layer, "is_linear", False))


def _is_mixture(layer: Any) -> bool:
    return "switch_mlp" in layer.mlp


def _expert_sizes(mixture: Any) -> tuple[int, int, int, bool]:
    """Experts, those of a token, numbers between their matrices, and norm_topk_prob."""
    _need(mixture.sharding_group is None)
    inner = mixture.switch_mlp["down_proj"].input_dims
    return mixture.num_experts, mixture.top_k, inner, mixture.norm_topk_prob


def _heads(attention: Any) -> tuple[int, int]:
    """Of queries and of keys, by the names that mlx-lm's classes give them."""
    if hasattr(attention, "n_heads"):
        return attention.n_heads, attention.n_kv_heads
    return attention.num_attention_heads, attention.num_key_value_heads


def _delta_sizes(rule: Any) -> tuple[int, int, int, int, bool]:
    """Heads, those of keys, numbers of each, taps, and whether value heads repeat them in turn."""
    from mlx_lm.models.qwen3_5 import GatedDeltaNet

    _need(type(rule) is GatedDeltaNet and rule.sharding_group is None)
    _need(type(rule.conv1d) in (nn.Conv1d, TilingConv1d) and "bias" not in rule.conv1d)
    _need(rule.head_k_dim == rule.head_v_dim)
    tiled = type(rule.conv1d) is TilingConv1d
    key_heads = rule.conv1d.key_heads if tiled else rule.num_k_heads
    return rule.num_v_heads, key_heads, rule.head_k_dim, rule.conv_kernel_size, tiled


def _add_layer(stack: _ext.Stack, layer: Any, eps: float, watched: _Watched) -> None:
    def watch(owner: Any, *names: str) -> None:
        watched.extend((owner, name, owner.get(name)) for name in names)

    def child(owner: Any, name: str, *kinds: type) -> Any:
        module = owner[name]
        _need(type(module) in kinds)
        watch(owner, name)
        watch(module, "weight", "bias")
        return module

    def norm(owner: Any, name: str) -> Any:
        if name not in owner:
            return None
        module = child(owner, name, nn.RMSNorm)
        _need(module.eps == eps)
        return _in_rows(module["weight"])

    def linears(owner: Any, *names: str) -> list[Any]:
        return [child(owner, name, QuantLinear) for name in names]

    def plain(owner: Any, *names: str) -> list[Any]:
        found = linears(owner, *names)
        _need(all("bias" not in linear for linear in found))
        return found

    def delta(rule: Any) -> tuple[mx.array, ...]:
        from mlx_lm.models.qwen3_5 import RMSNormGated

        taps = child(rule, "conv1d", nn.Conv1d, TilingConv1d)["weight"]
        gates = [child(rule, name, QuantLinear, nn.Linear) for name in ("in_proj_a", "in_proj_b")]
        _need(all("bias" not in gate for gate in gates))
        head = child(rule, "norm", RMSNormGated)
        _need(head.eps == eps)
        watch(rule, "dt_bias", "A_log")
        f32 = [rule[name].astype(mx.float32) for name in ("dt_bias", "A_log")]
        both = mx.concatenate([_dense(gate) for gate in gates])
        return tuple(map(_in_rows, (both, taps.squeeze(-1), *f32, head["weight"])))

    def experts(mixture: Any) -> tuple[Any, ...]:
        names = [name for name in ("gate", "shared_expert_gate") if name in mixture]
        gates = [child(mixture, name, QuantLinear, nn.Linear) for name in names]
        _need(all("bias" not in gate for gate in gates))
        watch(mixture, "switch_mlp", "shared_expert")
        switch = mixture.switch_mlp
        if type(switch) is FusedSwitchGLU:
            inner = ["gate_up_proj"]
        else:
            _need(type(switch) is SwitchGLU and type(switch.activation) is SwiGLU)
            watch(switch, "activation")
            inner = ["gate_proj", "up_proj"]
        *both, last = (child(switch, n, QuantSwitchLinear) for n in (*inner, "down_proj"))
        _need(all("bias" not in linear for linear in (*both, last)))
        router = _in_rows(mx.concatenate([_dense(gate) for gate in gates]))
        return (
            router,
            [(e["weight"], e.qtype, None) for e in both],
            (last["weight"], last.qtype, None),
        )

    mlp = layer.mlp
    watch(layer, "mlp")
    mixer: dict[str, Any] = {"q_norm": None, "k_norm": None, "delta": None}
    if _is_linear(layer):
        rule = layer.linear_attn
        watch(layer, "linear_attn")
        mixer["in_"] = _products(plain(rule, "in_proj_qkv", "in_proj_z"))
        mixer["delta"] = delta(rule)
        output = plain(rule, "out_proj")
    else:
        attention = layer.self_attn
        watch(layer, "self_attn")
        watch(attention, "rope")
        mixer["in_"] = _products(linears(attention, "q_proj", "k_proj", "v_proj"))
        mixer |= {name: norm(attention, name) for name in ("q_norm", "k_norm")}
        output = plain(attention, "o_proj")
    mixer |= {"experts": None, "down": None, "gate_up": []}
    if _is_mixture(layer):
        mixer["experts"] = experts(mlp)
        mlp = mlp.get("shared_expert", None)
    if mlp is not None:
        gate, up, down = plain(mlp, "gate_proj", "up_proj", "down_proj")
        _need([_rows(gate), _rows(up)] == [_rows(gate)] * 2)
        mixer |= {"gate_up": _products([gate, up]), "down": _products([down])[0]}
    stack.add_layer(
        input_norm=norm(layer, "input_layernorm"),
        output=_products(output)[0],
        mlp_norm=norm(layer, "post_attention_layernorm"),
        **mixer,
    )


def _rows(linear: Any) -> int:
    _need(type(linear) is QuantLinear)
    return int(linear["weight"].shape[0])


def _in_rows(a: mx.array) -> mx.array:
    """As the operation reads it, without gaps; evaluated."""
    a = mx.contiguous(a)
    mx.eval(a)
    return a


def _dense(linear: Any) -> mx.array:
    """Weights as float32 numbers."""
    if type(linear) is QuantLinear:
        return _ext.dequantize(linear["weight"], linear.qtype, mx.float32)
    return linear["weight"].astype(mx.float32)


def _products(linears: list[QuantLinear]) -> list[tuple[mx.array, str, mx.array | None]]:
    """Weights, types and biases, one for layers that follow each other in a group."""
    out = []
    while linears:
        first, count = linears[0], 1
        weight, bias = first["weight"], first.get("bias", None)
        if first._part is not None:
            group = first._part.group
            at = next(i for i, layer in enumerate(group.layers) if layer is first)
            pairs = zip(group.layers[at:], linears, strict=False)
            count = len(list(takewhile(lambda pair: pair[0] is pair[1], pairs)))
        if count > 1:
            begin, end = ([0, *group.ends, None][i] for i in (at, at + count))
            weight = group.weight[begin:end]
            bias = None if group.bias is None else group.bias[begin:end]
            mx.eval(weight, bias)
        out.append((weight, first.qtype, bias))
        linears = linears[count:]
    return out


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
    if not are(body["layers"], body._stacked) or len(caches) != len(body._stacked):
        return None
    if any(owner.get(key) is not value for owner, key, value in body._watched):
        return None
    if any(getattr(owner, name) != value for owner, name, value in body._told):
        return None
    if getattr(body, "pipeline_size", 1) > 1:
        return None
    x = body.embed_tokens(inputs) if embeddings is None else embeddings
    if x.dtype != body["norm"]["weight"].dtype:
        return None
    loan = lend(body._stack, caches)
    return None if loan is None else loan.step(caches, x)
