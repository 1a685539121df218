"""mlx-lm's LoRA layers around packed ones: what its tuner makes of our ``to_lora``."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from . import _ext


def _dense(layer: Any, dequantize: bool) -> mx.array:
    """The packed weights as numbers, if that is what fusing may make of them."""
    if not dequantize:
        raise ValueError(
            f"[fuse] Expected dequantize=True, as a sum of {layer.qtype} weights and an adapter is "
            f"not in that type. Received dequantize=False; or keep the adapter beside the weights."
        )
    return _ext.dequantize(layer["weight"], layer.qtype)


class QuantLoRALinear(LoRALinear):
    """``LoRALinear`` around a :class:`mlx_gguf.nn.QuantLinear`."""

    @classmethod
    def from_quant(cls, layer: Any, r: int, dropout: float, scale: float) -> QuantLoRALinear:
        N, K = layer._logical_shape()
        out = cls(input_dims=K, output_dims=N, r=r, dropout=dropout, scale=scale)
        out.linear = layer
        return out

    def fuse(self, dequantize: bool = False) -> nn.Linear:
        """Make a dense layer of weights and adapter.

        Raises
        ------
        ValueError
            Without ``dequantize``: weights are not packed anew here.
        """
        weight = _dense(self.linear, dequantize)
        fused = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in self.linear)
        fused.weight = weight + (self.scale * self.lora_b.T) @ self.lora_a.T
        if "bias" in self.linear:
            fused.bias = self.linear.bias
        return fused


class QuantLoRASwitchLinear(LoRASwitchLinear):
    """``LoRASwitchLinear`` around a :class:`mlx_gguf.nn.QuantSwitchLinear`."""

    @classmethod
    def from_quant(cls, layer: Any, r: int, dropout: float, scale: float) -> QuantLoRASwitchLinear:
        E, N, K = layer._logical_shape()
        out = cls(K, N, E, r=r, dropout=dropout, scale=scale)
        out.linear = layer
        return out

    def fuse(self, dequantize: bool = False) -> SwitchLinear:
        """As :meth:`QuantLoRALinear.fuse`, of every expert."""
        weight = _dense(self.linear, dequantize)
        E, N, K = weight.shape
        fused = SwitchLinear(K, N, E, bias="bias" in self.linear)
        fused.weight = weight + (self.scale * self.lora_b) @ self.lora_a
        if "bias" in self.linear:
            fused.bias = self.linear.bias
        return fused


class QuantLoRAEmbedding(LoRAEmbedding):
    """``LoRAEmbedding`` around a :class:`mlx_gguf.nn.QuantEmbedding`."""

    @classmethod
    def from_quant(cls, layer: Any, r: int, dropout: float, scale: float) -> QuantLoRAEmbedding:
        n, dims = layer._logical_shape()
        out = cls(n, dims, r=r, dropout=dropout, scale=scale)
        out.embedding = layer
        return out

    def fuse(self, dequantize: bool = False) -> nn.Embedding:
        """As :meth:`QuantLoRALinear.fuse`."""
        weight = _dense(self.embedding, dequantize)
        fused = nn.Embedding(*weight.shape)
        fused.weight = weight + (self.scale * self.lora_a) @ self.lora_b
        return fused
