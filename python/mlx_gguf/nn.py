"""Layers on packed weights that take the place of their mlx.nn namesakes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn import Module

from . import _ext
from .file import GGUFFile

__all__ = ["QuantEmbedding", "QuantLinear", "QuantSwitchLinear"]

_PLAIN = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}


def _format(op: str, qtype: str) -> _ext.Format:
    found = _ext.find_format(qtype)
    if found is None or not found.supported:
        known = " ".join(f.name for f in _ext.formats() if f.supported)
        raise ValueError(f"[{op}] Expected a tensor type of {known}. Received {qtype!r}.")
    return found


class _Frozen(set):
    """A module's frozen keys, of which those of the packed weights stay.

    A parent's ``unfreeze`` changes this set without calling the layer's own.
    """

    _packed = frozenset({"weight", "ggml_type"})

    def clear(self) -> None:
        self &= self._packed

    def difference_update(self, *keys: Any) -> None:
        super().difference_update(*keys)
        self |= self._packed


class _Packed(Module):
    """A layer whose ``weight`` is packed, with its type beside it.

    Parameters ``weight`` (uint8 ``[..., N, row_bytes]``, or plain numbers
    ``[..., N, K]``) and ``ggml_type`` (the type's ggml id, so that
    ``save_weights`` keeps it and ``load_weights`` restores it) have no gradient and
    stay frozen.
    """

    _part: Any = None  # of a product that several layers share: see fused.py

    def __init__(self, weight: mx.array, qtype: str):
        super().__init__()
        self._no_grad = _Frozen(_Frozen._packed)
        self.weight = weight
        self.ggml_type = mx.array(_format(type(self).__name__, qtype).id, mx.uint8)

    def __setitem__(self, key: str, value: Any) -> None:
        # Every way to set a parameter comes here, update and load_weights included.
        # Reading the type now lets a transformation trace the layer at any time.
        if key == "ggml_type":
            try:
                code = value.item()
            except ValueError:
                pass  # a placeholder of a transformation: types do not change
            else:
                found = _ext.find_format(code)
                if found is None:
                    raise ValueError(
                        f"[{type(self).__name__}] Expected ggml_type to be a ggml type id. "
                        f"Received {code}."
                    )
                self._known_type = found.name
        elif self._part is not None and key in ("weight", "bias"):
            self._part.dissolve()
        super().__setitem__(key, value)
        if key == "weight" or key == "ggml_type":
            # Once for all calls: asking an array for its dtype takes as long as the operation.
            known = getattr(self, "_known_type", "")
            self._type = _PLAIN.get(self["weight"].dtype, known) if "weight" in self else known

    @property
    def qtype(self) -> str:
        """GGUF's name of the weights' type, such as ``"q4_k"``."""
        return self._type

    def _logical_shape(self) -> tuple[int, ...]:
        *outer, last = self["weight"].shape
        if self["weight"].dtype in _PLAIN:
            return (*outer, last)
        fmt = _format(type(self).__name__, self.qtype)
        return (*outer, last // fmt.block_bytes * fmt.block_size)


def _zeros(op: str, shape: tuple[int, ...], qtype: str) -> mx.array:
    """Packed zeros: every type reads a block of zero bytes as zeros."""
    *outer, K = shape
    fmt = _format(op, qtype)
    if K % fmt.block_size:
        raise ValueError(
            f"[{op}] Expected input dims to be a multiple of {fmt.block_size}, the block size "
            f"of {fmt.name}. Received {K}."
        )
    return mx.zeros((*outer, fmt.row_bytes(K)), mx.uint8)


class QuantLinear(_Packed):
    """``nn.Linear`` on packed weights: ``x @ W.T + b``.

    Parameters
    ----------
    input_dims, output_dims : int
        K and N. K must be a multiple of the type's block size.
    bias : bool
        Whether there is a bias. Default: ``True``.
    qtype : str
        Tensor type as GGUF names it, in any case.

    Notes
    -----
    The new layer's weights are zero; :meth:`from_gguf` and :meth:`from_packed`
    make layers of existing ones. Inputs ``[..., K]`` give outputs ``[..., N]`` in
    the input's dtype; the bias is added in float32 before the one rounding.
    """

    def __init__(self, input_dims: int, output_dims: int, bias: bool = True, *, qtype: str):
        super().__init__(_zeros("QuantLinear", (output_dims, input_dims), qtype), qtype)
        if bias:
            self.bias = mx.zeros((output_dims,))

    @classmethod
    def from_packed(cls, weight: mx.array, qtype: str, bias: mx.array | None = None) -> QuantLinear:
        """Make a layer of packed weights ``[N, row_bytes]`` without copying them."""
        layer = cls.__new__(cls)
        _Packed.__init__(layer, weight, qtype)
        if bias is not None:
            layer.bias = bias
        return layer

    @classmethod
    def from_gguf(cls, file: GGUFFile, name: str) -> QuantLinear:
        """Make a layer of a file's tensor.

        Parameters
        ----------
        file : GGUFFile
        name : str
            ``"blk.0.attn_q.weight"``, or the same without ``.weight``. A tensor
            that ends in ``.bias`` instead becomes the bias.
        """
        stem = name.removesuffix(".weight")
        name = stem + ".weight"
        bias = file[stem + ".bias"] if stem + ".bias" in file.tensors else None
        info = file.tensors[name]
        if len(info.shape) != 2:
            raise ValueError(
                f"[QuantLinear.from_gguf] Expected a matrix. Received {name} of shape {info.shape}."
            )
        return cls.from_packed(file[name], info.qtype, bias)

    def _extra_repr(self) -> str:
        N, K = self._logical_shape()
        return f"input_dims={K}, output_dims={N}, bias={'bias' in self}, qtype={self.qtype}"

    def __call__(self, x: mx.array) -> mx.array:
        part = self._part
        if part is not None:
            y = part.take(x)
            if y is None:
                y = part.make(x)
            if y is not None:
                return y
        if "bias" in self:
            return _ext.quantized_addmm(self["bias"], x, self["weight"], self._type)
        return _ext.quantized_matmul(x, self["weight"], self._type)

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> Any:
        """Put mlx-lm's LoRA around the layer; what its tuner calls."""
        from .lora import QuantLoRALinear

        return QuantLoRALinear.from_quant(self, r, dropout, scale)


class QuantEmbedding(_Packed):
    """``nn.Embedding`` on packed rows: gathers rows, then dequantises those alone.

    Parameters
    ----------
    num_embeddings, dims : int
    qtype : str
        Tensor type as GGUF names it, in any case.
    dtype : Dtype
        Of the embeddings handed out. Default: ``float32``.
    """

    def __init__(self, num_embeddings: int, dims: int, *, qtype: str, dtype: mx.Dtype = mx.float32):
        super().__init__(_zeros("QuantEmbedding", (num_embeddings, dims), qtype), qtype)
        self._dtype = dtype

    @classmethod
    def from_packed(
        cls, weight: mx.array, qtype: str, dtype: mx.Dtype = mx.float32
    ) -> QuantEmbedding:
        """Make a layer of packed rows ``[num_embeddings, row_bytes]``."""
        layer = cls.__new__(cls)
        _Packed.__init__(layer, weight, qtype)
        layer._dtype = dtype
        return layer

    @classmethod
    def from_gguf(
        cls, file: GGUFFile, name: str = "token_embd.weight", dtype: mx.Dtype = mx.float32
    ) -> QuantEmbedding:
        """Make a layer of a file's tensor."""
        return cls.from_packed(file[name], file.tensors[name].qtype, dtype)

    def _extra_repr(self) -> str:
        n, dims = self._logical_shape()
        return f"{n}, {dims}, qtype={self.qtype}, dtype={self._dtype}"

    def __call__(self, x: mx.array) -> mx.array:
        return _ext.dequantize(self["weight"][x], self.qtype, self._dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Multiply by the embeddings, as a head tied to them does."""
        return _ext.quantized_matmul(x, self["weight"], self.qtype)

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> Any:
        """Put mlx-lm's LoRA around the layer; what its tuner calls."""
        from .lora import QuantLoRAEmbedding

        return QuantLoRAEmbedding.from_quant(self, r, dropout, scale)


class QuantSwitchLinear(_Packed):
    """mlx-lm's ``SwitchLinear`` on packed experts.

    Parameters
    ----------
    input_dims, output_dims, num_experts : int
    bias : bool
        Default: ``True``.
    qtype : str
        Tensor type as GGUF names it, in any case.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        num_experts: int,
        bias: bool = True,
        *,
        qtype: str,
    ):
        shape = (num_experts, output_dims, input_dims)
        super().__init__(_zeros("QuantSwitchLinear", shape, qtype), qtype)
        if bias:
            self.bias = mx.zeros((num_experts, output_dims))

    @classmethod
    def from_packed(
        cls, weight: mx.array, qtype: str, bias: mx.array | None = None
    ) -> QuantSwitchLinear:
        """Make a layer of packed experts ``[E, N, row_bytes]`` without copying them."""
        layer = cls.__new__(cls)
        _Packed.__init__(layer, weight, qtype)
        if bias is not None:
            layer.bias = bias
        return layer

    @property
    def input_dims(self) -> int:
        return self._logical_shape()[2]

    @property
    def output_dims(self) -> int:
        return self._logical_shape()[1]

    @property
    def num_experts(self) -> int:
        return self._logical_shape()[0]

    def _extra_repr(self) -> str:
        E, N, K = self._logical_shape()
        return (
            f"input_dims={K}, output_dims={N}, num_experts={E}, bias={'bias' in self}, "
            f"qtype={self.qtype}"
        )

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = _ext.gather_qmm(
            x,
            self["weight"],
            self.qtype,
            rhs_indices=indices,
            sorted_indices=sorted_indices,
        )
        if "bias" in self:
            y = y + mx.expand_dims(self["bias"][indices], -2).astype(y.dtype)
        return y

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> Any:
        """Put mlx-lm's LoRA around the layer; what its tuner calls."""
        from .lora import QuantLoRASwitchLinear

        return QuantLoRASwitchLinear.from_quant(self, r, dropout, scale)
