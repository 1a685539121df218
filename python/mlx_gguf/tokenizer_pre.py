"""The word-splitting rules behind `tokenizer.ggml.pre`.

Byte-level BPE never merges across a word boundary, so ids depend on how the text is cut first. A
GGUF file does not hold the rule, only its name. Each rule here is the list of patterns of the
published `tokenizer.json` of that family, applied one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"  # noqa: RUF001

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, suffix: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How one family cuts text, and the defaults that come with it.

    Attributes
    ----------
    patterns : tuple of str
        Regular expressions (Oniguruma), each applied to the pieces the one before left; a match
        and the text between matches both become pieces.
    whole_words : bool
        A piece that is a token as it stands is not rebuilt from merges.
    add_bos : bool
        Whether a BOS starts the prompt when the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_RULES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 mpt olmo jais exaone4 gigachat a.x-4.0 mellum trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    (
        "gpt-4o llama4 kanana2 minimax-m2",
        PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),)),
    ),
    ("tekken", PreTokenizer((_cased_words(r"\p{N}", ""),), whole_words=True, add_bos=True)),
    (
        "deepseek-v3 hunyuan-dense joyai-llm",
        PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3)),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rule for names, rule in _RULES for name in names.split()
}
"""Every known value of `tokenizer.ggml.pre`, as the file spells it."""
