"""Vocabularies of 320 tokens, written with real tokenizer metadata, for the reference models."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from gguf import GGUFWriter, TokenType

SIZE = 320

_TEXT = (
    "the reader opens the file and maps the tensors into memory then the model reads the weights "
    "of the layer in the order of the file and the kernel adds the products in the registers "
    "when the last row is done the answer is there and the token is sent to the writer that prints "
    "the text on the terminal and the loop begins again with the next token until the end is seen"
)


def add_vocabulary(writer: GGUFWriter, arch: str) -> None:
    """Write the `tokenizer.ggml.*` keys that files of `arch` carry."""
    if arch in ("gemma2", "gemma3"):
        _add_sentencepiece(writer)
    elif arch == "llama":
        specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]
        _add_bytelevel(writer, "llama-bpe", specials, bos=0, eos=3, pad=None, add_bos=True)
    else:
        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"]
        pre = "qwen35" if arch.startswith("qwen35") else "qwen2"
        _add_bytelevel(writer, pre, specials, bos=0, eos=2, pad=0, add_bos=False)


def control_ids(arch: str) -> range:
    """Ids of the control tokens, end of text among them."""
    return range(6) if arch in ("gemma2", "gemma3") else range(SIZE - 4, SIZE)


def _add_bytelevel(writer, pre, specials, *, bos, eos, pad, add_bos):
    characters = _byte_characters()
    merges = _learn_merges("Ġ", set(characters), SIZE - 256 - len(specials))
    tokens = characters + [a + b for a, b in merges]
    first = len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + specials)
    writer.add_token_types([TokenType.NORMAL] * first + [TokenType.CONTROL] * len(specials))
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(first + bos)
    writer.add_eos_token_id(first + eos)
    if pad is not None:
        writer.add_pad_token_id(first + pad)
    writer.add_add_bos_token(add_bos)


def _add_sentencepiece(writer):
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    types = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    characters = sorted(set(_TEXT.replace(" ", "▁")))
    count = SIZE - len(specials) - 256 - len(characters)
    pieces = [a + b for a, b in _learn_merges("▁", set(characters), count)] + characters
    first = len(specials) + 256
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(specials + byte_tokens + pieces)
    # Merges are taken in the order of descending score, which is the order of the ids.
    writer.add_token_scores([0.0] * first + [-float(i) for i in range(len(pieces))])
    types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces)
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _byte_characters() -> list[str]:
    """The printable stand-ins of the 256 bytes, in the order of GPT-2's vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def _learn_merges(space: str, known: set[str], count: int) -> list[tuple[str, str]]:
    """Byte-pair merges of `_TEXT`, the most frequent pair first."""
    words = [list((space if i else "") + word) for i, word in enumerate(_TEXT.split())]
    merges: list[tuple[str, str]] = []
    known = set(known)
    while len(merges) < count:
        pairs = Counter(p for word in words for p in pairwise(word))
        fresh = [p for p in pairs if p[0] + p[1] not in known]
        a, b = min(fresh, key=lambda p: (-pairs[p], p))
        merges.append((a, b))
        known.add(a + b)
        words = [_merge(word, a, b) for word in words]
    return merges


def _merge(word: list[str], a: str, b: str) -> list[str]:
    out: list[str] = []
    for piece in word:
        if piece == b and out and out[-1] == a:
            out[-1] = a + b
        else:
            out.append(piece)
    return out
