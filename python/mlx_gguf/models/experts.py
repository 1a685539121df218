"""What mixtures of experts share: tensor names, sizes, and gate and up in one tensor."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..file import GGUFFile
from .base import Keys

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
    "ffn_gate_up_exps": "mlp.switch_mlp.gate_up_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def expert_config(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    """ModelArgs fields of Qwen's mixtures of experts, all layers being one."""
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        # Not in every file's metadata.
        "moe_intermediate_size": file.tensors["blk.0.ffn_down_exps.weight"].shape[-1],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


class FusedSwitchGLU(nn.Module):
    """mlx-lm's ``SwitchGLU`` with gate and up as the rows of one tensor.

    One product gives both, so that the tensor stays whole: half of every expert's
    rows would not be contiguous, and would have to be copied.
    """

    def __init__(self, input_dims: int, hidden_dims: int, num_experts: int):
        super().__init__()
        from mlx_lm.models.switch_layers import SwitchLinear

        self.gate_up_proj = SwitchLinear(input_dims, 2 * hidden_dims, num_experts, bias=False)
        self.down_proj = SwitchLinear(hidden_dims, input_dims, num_experts, bias=False)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        # As mlx-lm does it: many tokens are sorted by expert first.
        from mlx_lm.models.activations import swiglu
        from mlx_lm.models.switch_layers import _gather_sort, _scatter_unsort

        x = mx.expand_dims(x, (-2, -3))
        chosen, inverse = mx.stop_gradient(indices), None
        if indices.size >= 64:
            x, chosen, inverse = _gather_sort(x, chosen)
        is_sorted = inverse is not None
        gate, up = mx.split(self.gate_up_proj(x, chosen, sorted_indices=is_sorted), 2, axis=-1)
        x = self.down_proj(swiglu(gate, up), chosen, sorted_indices=is_sorted)
        if is_sorted:
            x = _scatter_unsort(x, inverse, indices.shape)
        return x.squeeze(-2)


def fuse_gate_up(model: Any, file: GGUFFile) -> None:
    """Make room for ``ffn_gate_up_exps`` in the layers whose file holds it."""
    for i, layer in enumerate(model.layers):
        if f"blk.{i}.ffn_gate_up_exps.weight" in file:
            down = layer.mlp.switch_mlp.down_proj
            layer.mlp.switch_mlp = FusedSwitchGLU(
                down.output_dims, down.input_dims, down.num_experts
            )
