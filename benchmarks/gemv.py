"""How close products come to what the machine's memory and arithmetic allow: the roofline.

    python benchmarks/gemv.py                                  # decoding, the common types, < 1 min
    python benchmarks/gemv.py --types q4_k q6_k --shapes 4096x12288 12288x4096 --rows 1 4 512
    python benchmarks/gemv.py --dtype float16 --compare        # beside MLX's products and ggml's
    python benchmarks/gemv.py --json gemv.json --plot roofline.png

| option | default | |
|---|---|---|
| `--backend NAME` | MLX's default | where products run |
| `--types TYPE ...` | `q4_k q5_k q6_k q8_0 iq4_xs` | tensor types |
| `--shapes NxK ...` | `4096x4096` | rows of the weights, and weights in one |
| `--rows M ...` | `1` | rows of x |
| `--dtype DTYPE ...` | what a model gets | of x: float32, float16, bfloat16 |
| `--rounds N` | 7 | samples of each product; figures are medians |
| `--compare` | | rivals that are installed, too |
| `--json PATH` | | everything, with machine, date and versions |
| `--plot PATH` | | the roofline as a picture; needs `mlx-gguf[plot]` |

`mlx-gguf bench` is the same, and `mlx-gguf bench --help` says how it measures.
"""

from __future__ import annotations

import sys

from mlx_gguf.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
