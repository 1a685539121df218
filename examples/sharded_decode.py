"""Decode with a model whose layers are shared by several processes, or machines.

    mlx.launch -n 2 --backend ring -- python examples/sharded_decode.py FILE [--prompt TEXT]

On several machines: `mlx.launch --hostfile hosts.json --backend ring -- ...`, FILE on each of them.
Every rank maps the file and holds its share of it: some rows of the layers whose outputs the ranks
share, some columns, in whole blocks, of those whose outputs they sum. So ranks must divide the
heads, and the blocks in a row of `attn_output` and `ffn_down`. Without mlx.launch there is one
rank, and this is `decode.py`.
"""

import argparse

import mlx.core as mx

import mlx_gguf as gg
from decode import decode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="a .gguf file")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    group = mx.distributed.init()
    model, tokenizer = gg.load(args.file, group=group)

    # Every rank computes the same tokens; sampling by chance would need a common seed.
    prompt = tokenizer.encode(args.prompt)
    reply = decode(model, prompt, tokenizer.eos_token_ids, args.max_tokens, temp=0)
    text = tokenizer.decode(list(reply))
    if group.rank() == 0:
        print(args.prompt + text)


if __name__ == "__main__":
    main()
