"""A GGUF vocabulary as the parts of a `tokenizers.Tokenizer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from . import _ext
from .tokenizer_pre import PRE_TOKENIZERS, PreTokenizer

# tokenizer.ggml.token_type, numbered as gguf.TokenType.
_UNKNOWN, CONTROL, _USER_DEFINED, BYTE = 2, 3, 4, 6

KEY = "tokenizer.ggml."


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file: text, type and, for SentencePiece, score, indexed by id."""

    tokens: list[str]
    types: Sequence[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read `tokenizer.ggml.tokens` and `.token_type`.

        Raises
        ------
        ValueError
            If the tokens are missing, repeated or not UTF-8, or there is not one type for each.
        """
        tokens = array(metadata, "tokens", str)
        if not tokens:
            raise ValueError(f"[load_tokenizer] Expected tokens in {KEY}tokens. Received none.")
        # Converters pad with empty strings; every id still needs a text of its own.
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            first = next(i for i, token in enumerate(tokens) if ids[token] != i)
            raise ValueError(
                f"[load_tokenizer] Expected every token of {KEY}tokens once. "
                f"Received {tokens[first]!r} as ids {first} and {ids[tokens[first]]}."
            )
        _check_utf8("tokens", tokens)
        types = array(metadata, "token_type", int, len(tokens)) or [1] * len(tokens)
        return cls(tokens, types, ids)

    def added_tokens(self, special_ids: Iterable[int | None]) -> list[AddedToken]:
        """The tokens that are cut out of the text before anything else.

        All but the user-defined ones are special: `skip_special_tokens` drops them. So are
        `special_ids`, whatever their type.
        """
        kinds = np.array(self.types)
        special = set(np.flatnonzero((kinds == _UNKNOWN) | (kinds == CONTROL)).tolist())
        special.update(i for i in special_ids if i is not None)
        user_defined = np.flatnonzero(kinds == _USER_DEFINED).tolist()
        return [
            AddedToken(self.tokens[i], special=i in special, normalized=False)
            for i in sorted(special.union(user_defined))
        ]


def array(
    metadata: Mapping[str, Any], name: str, element: type, size: int | None = None
) -> list[Any]:
    """The array `tokenizer.ggml.<name>`, empty if absent, of `size` elements if given."""
    values = metadata.get(KEY + name, [])
    kinds = set(map(type, values)) if isinstance(values, list) else {type(values)}
    if not isinstance(values, list) or not kinds <= {element}:
        raise ValueError(
            f"[load_tokenizer] Expected an array of {element.__name__} in {KEY}{name}. "
            f"Received {' and '.join(sorted(kind.__name__ for kind in kinds))}."
        )
    if values and size is not None and len(values) != size:
        raise ValueError(
            f"[load_tokenizer] Expected {size} elements in {KEY}{name}, one for each token. "
            f"Received {len(values)}."
        )
    return values


def _check_utf8(name: str, texts: list[str]) -> None:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"[load_tokenizer] Expected UTF-8 in {KEY}{name}. "
            f"Received a text with {error.object[error.start : error.end]!r}."
        ) from None


def pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The rule named by `tokenizer.ggml.pre`.

    Raises
    ------
    ValueError
        If the key is missing or its value unknown: a guess would give other ids without a word.
    """
    pre = metadata.get(f"{KEY}pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"[load_tokenizer] Expected {KEY}pre to be one of "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Received {pre!r}."
        )
    return PRE_TOKENIZERS[pre]


def byte_level_bpe(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary
) -> None:
    """Make `tokenizer` what `tokenizer.ggml.model = "gpt2"` describes."""
    rule = pre_tokenizer(metadata)
    texts = array(metadata, "merges", str)
    if not texts:
        raise ValueError(f"[load_tokenizer] Expected merges in {KEY}merges. Received none.")
    _check_utf8("merges", texts)
    ids = vocabulary.ids
    merges = _ext.cut_at_spaces(texts)
    try:
        tokenizer.model = models.BPE(vocab=ids, merges=merges, ignore_merges=rule.whole_words)
    except Exception as error:  # the library's own class, for a token that is not there
        known = (left in ids and right in ids and left + right in ids for left, right in merges)
        rank = next((rank for rank, fits in enumerate(known) if not fits), None)
        if rank is None:
            raise
        raise ValueError(
            f"[load_tokenizer] Expected merge {rank} of {KEY}merges to join two tokens "
            f"into a third. Received {texts[rank]!r}."
        ) from error
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in rule.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()


def sentencepiece_bpe(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary
) -> None:
    """Make `tokenizer` what `tokenizer.ggml.model = "llama"` describes."""
    unknown = [t for t, k in zip(vocabulary.tokens, vocabulary.types, strict=True) if k == _UNKNOWN]
    tokenizer.model = models.BPE(
        vocab=vocabulary.ids,
        merges=_derive_merges(vocabulary, array(metadata, "scores", float, len(vocabulary.tokens))),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = normalizers.Replace(" ", "▁")
    # These two sequences of decoders are the ones mlx_lm's streaming detokenizer knows.
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space_prefix(metadata):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)


def adds_space_prefix(metadata: Mapping[str, Any]) -> bool:
    """Whether a SentencePiece tokenizer puts a space before the text."""
    return bool(metadata.get(f"{KEY}add_space_prefix", True))


def _derive_merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best token first.

    SentencePiece joins the neighbours whose union scores best; the pair itself has no rank.
    """
    tokens, types = vocabulary.tokens, vocabulary.types
    order = [i for i, kind in enumerate(types) if kind not in (_UNKNOWN, CONTROL, BYTE)]
    if scores:
        order.sort(key=lambda i: -scores[i])
    return _ext.splits(tokens, order)
