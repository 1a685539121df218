"""Kernels of a model made as it is loaded.

CUDA kernels are compiled on this machine, each in about a second, and kept on disk. A first token
would wait for one after the other; here they are made on all processors at a time.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from . import _ext
from .nn import QuantEmbedding, QuantLinear, QuantSwitchLinear

__all__ = ["compile_ahead"]

# Rows of x for which other kernels serve: a token, part of a prompt, most of one.
_ROWS = (1, 9, 256)
_PAIRS = 8  # of a row and an expert: of a token, and of a long prompt for each expert


def compile_ahead(model: Any, dtype: mx.Dtype) -> None:
    """Make the CUDA kernels for a model's matrices, by what prompts and tokens need, and those of
    its steps and gated delta rules; without CUDA do nothing.

    Parameters
    ----------
    model : mlx.nn.Module
    dtype : Dtype
        Of activations.
    """
    x = str(dtype).rpartition(".")[2]
    products = set()
    for layer in model.modules():
        if not isinstance(layer, (QuantLinear, QuantEmbedding, QuantSwitchLinear)):
            continue
        *experts, N, K = layer._logical_shape()
        if layer._part is not None:  # the product of several layers is one
            N = layer._part.group.weight.shape[0]
        count = experts[0] if experts else 0
        rows = (_PAIRS, _PAIRS * count) if experts else _ROWS
        products |= {(layer.qtype, x, M, N, K, count, True) for M in rows}
        if isinstance(layer, QuantEmbedding):
            products.add((layer.qtype, x, 0, N, K, 0, True))
    stack = getattr(getattr(model, "model", None), "_stack", None)
    functions = set() if stack is None else set(stack.cuda_functions)
    for layer in model.modules():  # gated delta rules, by what mlx-lm calls their sizes
        if hasattr(layer, "head_k_dim"):
            functions.add(_ext.cuda_delta_function(x, layer.head_k_dim))
    _ext.cuda_compile(sorted(products), sorted(functions))
