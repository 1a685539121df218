"""The tokenizer of a GGUF file, as mlx-lm wants it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from mlx_lm import tokenizer_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from .chat_template import bounded
from .tokenizer_models import (
    BYTE,
    CONTROL,
    KEY,
    Vocabulary,
    adds_space_prefix,
    byte_level_bpe,
    pre_tokenizer,
    sentencepiece_bpe,
)

# Control tokens that end a turn or a text. Files name one or two of theirs by id; models stop on
# all of them. Only control tokens count: Gemma's `</s>` is an HTML tag.
_STOP_TOKENS = {
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<eos>",
    "</s>",
    "<EOT>",
    "[EOT]",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
}

# The ids a file names, by the attributes transformers has for them.
_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def load_tokenizer(
    metadata: Mapping[str, Any], *, chat_template: str | None = None
) -> TokenizerWrapper:
    """Build the tokenizer that a GGUF file describes.

    Parameters
    ----------
    metadata : mapping
        The file's metadata, as in ``gg.open(path).metadata``.
    chat_template : str, optional
        A Jinja template to use in place of the file's ``tokenizer.chat_template``.

    Returns
    -------
    mlx_lm.tokenizer_utils.TokenizerWrapper
        What ``mlx_lm.load`` returns in its second place: encoding and decoding, the chat template,
        a streaming detokenizer, tool calls and ``eos_token_ids`` with every stop token.

    Raises
    ------
    ValueError
        If the kind of tokenizer (``tokenizer.ggml.model``) or its word-splitting rule
        (``tokenizer.ggml.pre``) is not known, or the vocabulary is inconsistent.

    Notes
    -----
    A BOS is added where ``tokenizer.ggml.add_bos_token`` says so; without the key, as the kind
    wants it: always for ``llama``, by ``pre`` for ``gpt2``. Text that already starts with the BOS,
    as a rendered chat template does, is to be encoded with ``add_special_tokens=False``;
    mlx_lm.generate and its server do that by themselves.
    """
    kind = metadata.get(f"{KEY}model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"[load_tokenizer] Expected {KEY}model to be gpt2 or llama. Received {kind!r}."
        )
    with _no_collections():
        return _build(kind, metadata, chat_template)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the garbage collector from looking at a million new strings again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _build(kind: str, metadata: Mapping[str, Any], chat_template: str | None) -> TokenizerWrapper:
    vocabulary = Vocabulary.read(metadata)
    # The vocabulary goes in afterwards: given a whole tokenizer, transformers copies it through
    # JSON, which takes longer than all the rest.
    hf_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()),
        chat_template=chat_template or metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    if kind == "gpt2":
        byte_level_bpe(hf_tokenizer.backend_tokenizer, metadata, vocabulary)
        detokenizer: Any = partial(_BPEDetokenizer, tokens=vocabulary.tokens)
        add_bos = pre_tokenizer(metadata).add_bos
        defaults: dict[str, int] = {}
    else:
        sentencepiece_bpe(hf_tokenizer.backend_tokenizer, metadata, vocabulary)
        detokenizer = _sentencepiece_detokenizer(metadata, vocabulary)
        add_bos = True
        defaults = {"bos": 1, "eos": 2, "unknown": 0}

    ids = {
        name: _token_id(metadata, vocabulary, name, defaults.get(name))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    hf_tokenizer.add_tokens(vocabulary.added_tokens(ids.values()))
    attributes: dict[str, Any] = {
        role: vocabulary.tokens[token]
        for name, role in _ROLES.items()
        if (token := ids[name]) is not None
    }
    attributes["add_bos_token"] = bool(metadata.get(f"{KEY}add_bos_token", add_bos))
    attributes["add_eos_token"] = bool(metadata.get(f"{KEY}add_eos_token", False))
    for attribute, value in attributes.items():
        setattr(hf_tokenizer, attribute, value)
    return _wrap(hf_tokenizer, detokenizer, _stop_ids(vocabulary, ids), vocabulary)


def _token_id(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, name: str, default: int | None
) -> int | None:
    key = f"{KEY}{name}_token_id"
    token = metadata.get(key, default)
    # Converters write -1, as unsigned, for "none".
    if token is None or token in (-1, 0xFFFFFFFF):
        return None
    if not isinstance(token, int) or not 0 <= token < len(vocabulary.tokens):
        raise ValueError(
            f"[load_tokenizer] Expected {key} to be an id below {len(vocabulary.tokens)}. "
            f"Received {token!r}."
        )
    return token


def _stop_ids(vocabulary: Vocabulary, ids: Mapping[str, int | None]) -> set[int]:
    stops = {i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None}
    texts = {
        token
        for token in _STOP_TOKENS & vocabulary.ids.keys()
        if vocabulary.types[vocabulary.ids[token]] == CONTROL
    }
    # In the harmony format `<|end|>` only ends a message: the turn goes on until one of these.
    if {"<|return|>", "<|call|>"} <= texts:
        texts.discard("<|end|>")
    return stops | {vocabulary.ids[token] for token in texts}


def _sentencepiece_detokenizer(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Any:
    # mlx_lm's fast class takes every token that starts so for a byte, and fails on others.
    if any(
        token.startswith("<0x") and kind != BYTE
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ):
        return tokenizer_utils.NaiveStreamingDetokenizer
    return partial(
        _SPMDetokenizer,
        vocabulary=vocabulary,
        trim_space=adds_space_prefix(metadata),
    )


class _BPEDetokenizer(tokenizer_utils.BPEStreamingDetokenizer):
    """mlx_lm's, without asking the tokenizer for every token's text once more."""

    def __init__(self, tokenizer: Any, tokens: list[str]):
        self.tokenmap = tokens
        self.reset()


class _SPMDetokenizer(tokenizer_utils.SPMStreamingDetokenizer):
    """The same."""

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, trim_space: bool):
        self.trim_space = trim_space
        self.tokenmap = [token.encode() for token in vocabulary.tokens]
        for i, kind in enumerate(vocabulary.types):
            if kind == BYTE:  # its value in hex
                self.tokenmap[i] = bytes([int(vocabulary.tokens[i][3:5], 16)])
        self.reset()


def _wrap(
    hf_tokenizer: PreTrainedTokenizerFast,
    detokenizer: Any,
    stop_ids: set[int],
    vocabulary: Vocabulary,
) -> TokenizerWrapper:
    """Wrap as mlx_lm.tokenizer_utils.load does for a tokenizer.json."""
    tools = {}
    # mlx_lm asks for the whole vocabulary to look a few tokens up.
    hf_tokenizer.get_vocab = lambda: vocabulary.ids  # type: ignore[method-assign]
    if (name := tokenizer_utils._infer_tool_parser(hf_tokenizer)) is not None:
        parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        hf_tokenizer.init_kwargs["tool_parser_type"] = name
        tools = {
            "tool_parser": parser.parse_tool_call,
            "tool_call_start": parser.tool_call_start,
            "tool_call_end": parser.tool_call_end,
        }
    if hf_tokenizer.chat_template is not None:
        tools["chat_template"] = bounded(hf_tokenizer.apply_chat_template)
    wrapper = TokenizerWrapper(hf_tokenizer, detokenizer, eos_token_ids=stop_ids, **tools)
    del hf_tokenizer.get_vocab
    return wrapper
