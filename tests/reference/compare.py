"""Run a loaded model as the references were run, and measure how far its logits are."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

_FOLDER = Path(__file__).parent


class Reference:
    """PyTorch's word on the models of one .npz file."""

    def __init__(self, file: str):
        self._arrays = np.load(_FOLDER / file)

    def get(self, model: str, key: str) -> np.ndarray:
        return self._arrays[f"{model}/{key}"]

    def errors(self, name: str, model) -> tuple[float, float, list[int]]:
        """Relative L2 errors of the prompt's logits and of 20 cached steps, and the greedy ids."""
        cache = make_prompt_cache(model)
        first = model(mx.array(self.get(name, "prompt"))[None], cache=cache)[0]
        steps = [first[-1]]
        for token in self.get(name, "greedy").tolist():
            steps.append(model(mx.array([[token]]), cache=cache)[0, -1])
        got = np.array(mx.stack(steps).astype(mx.float32))
        return (
            relative_l2(first, self.get(name, "prompt_logits")),
            relative_l2(got[1:], self.get(name, "decode_logits")),
            got[:-1].argmax(axis=-1).tolist(),
        )


def relative_l2(got, want) -> float:
    """Size of the difference over the size of what is wanted, all elements together."""
    got = np.array(got.astype(mx.float32)) if isinstance(got, mx.array) else got
    want = np.array(want.astype(mx.float32)) if isinstance(want, mx.array) else want
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
