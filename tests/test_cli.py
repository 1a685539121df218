"""The command line: what it prints, where, and how it fails."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess

import gguf
import mlx_lm
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import random_blocks
from cli_support import GEMMA_IDS, PROMPT, SMOLLM2_IDS, command, run, text_of
from mlx_gguf.cli import build_parser, main
from mlx_gguf.cli.options import render_chat
from mlx_gguf.tokenizer import load_tokenizer


def write(path, *, arch="llama", tensors=(), fields=(), **options):
    """Write a GGUF file of (name, numpy array, raw type or None)."""
    writer = gguf.GGUFWriter(str(path), arch, **options)
    for key, value in fields:
        writer.add_string(key, value)
    for name, array, qtype in tensors:
        writer.add_tensor(name, array, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def fails(capsys, *args):
    """Run a command that must fail with one line; return the line."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mlx-gguf: error: [")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


# inspect


def test_inspect_json_agrees_with_gguf_py(smollm2, capsys):
    assert main(["inspect", smollm2, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    reader = gguf.GGUFReader(smollm2)
    expected = [
        {
            "name": t.name,
            "type": t.tensor_type.name.lower(),
            "shape": [int(n) for n in reversed(t.shape)],
            "bytes": t.n_bytes,
            "offset": t.data_offset,
            "shard": 0,
        }
        for t in reader.tensors
    ]
    assert report["tensors"] == expected
    assert report["parameters"] == sum(t.n_elements for t in reader.tensors)
    assert report["tensor_bytes"] == sum(t.n_bytes for t in reader.tensors)
    assert report["file_bytes"] == os.path.getsize(smollm2)
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = report["metadata"][key]
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            assert value["length"] == len(field.data)
        else:
            assert value == field.contents()


def test_census_adds_up_to_the_tensors(gemma, capsys):
    assert main(["inspect", gemma, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts = {row["type"]: row["tensors"] for row in report["types"]}
    assert counts == {"f32": 109, "q5_0": 81, "q4_k": 27, "q8_0": 10, "q6_k": 9}
    assert sum(row["bytes"] for row in report["types"]) == report["tensor_bytes"]
    assert sum(row["parameters"] for row in report["types"]) == report["parameters"]
    assert sum(row["share"] for row in report["types"]) == pytest.approx(1)
    for row in report["types"]:
        kind = gguf.GGMLQuantizationType[row["type"].upper()]
        weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
        assert row["bits_per_weight"] == pytest.approx(8 * nbytes / weights)


def test_inspect_tables(smollm2, capsys):
    assert main(["inspect", smollm2, "--metadata"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert lines["architecture"] == ["llama"]
    assert lines["parameters"] == ["134,515,008"]
    assert lines["context"] == ["8192"]
    assert lines["tokenizer.ggml.tokens"] == ["49,152", "long", "array[string]"]
    for tensor in gguf.GGUFReader(smollm2).tensors:
        kind, *shape, nbytes = lines[tensor.name]
        assert kind == tensor.tensor_type.name.lower()
        assert " ".join(shape) == " x ".join(str(n) for n in reversed(tensor.shape))
        assert nbytes == f"{tensor.n_bytes:,}"
    assert lines["total"] == ["272", "96,576,768", "100.0", "%", "5.74"]

    assert main(["inspect", smollm2, "--no-tensors"]) == 0
    assert "blk.0" not in capsys.readouterr().out


def mix_of(capsys, path):
    """The mix line, and the same from JSON."""
    assert main(["inspect", path, "--no-tensors"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert main(["inspect", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    line = lines["mix"].split(maxsplit=1)[1]
    assert line.startswith(report["mix"]["name"] + ": ")
    return line, report["mix"]["source"], report["unsupported"]


def test_inspect_names_the_mix_of_real_files(smollm2, gemma, capsys):
    line, source, unsupported = mix_of(capsys, gemma)
    assert (source, unsupported) == ("general.file_type", [])
    assert line == "Q4_K_M: Q8_0 73 %, Q5_0 18 %, Q4_K 5 %, Q6_K 4 %, F32 <1 %"
    assert mix_of(capsys, smollm2) == ("Q4_1: Q4_1 69 %, Q8_0 31 %, F32 <1 %", "uniform", [])


Q4_K_M = (("attn_q", "q4_k"), ("ffn_up", "q4_k"), ("ffn_down", "q6_k"))


@pytest.mark.parametrize(
    ("types", "name", "file_type", "expected"),
    [
        (Q4_K_M, None, 15, ("Q4_K_M", "general.file_type")),
        (Q4_K_M, None, None, ("Q4_K_M-like", "guess")),
        # 1024 marks a number that the writer has guessed itself, 999 is none.
        (Q4_K_M, None, 1024 + 15, ("Q4_K_M-like", "guess")),
        (Q4_K_M, None, 999, ("Q4_K_M-like", "guess")),
        (Q4_K_M, "Some 4B UD-Q4_K_XL", 15, ("UD-Q4_K_XL", "general.name")),
        (Q4_K_M, "IQ4K_Many", 15, ("Q4_K_M", "general.file_type")),
        # The file_type says another type than any of the tensors.
        (Q4_K_M, None, 2, ("Q4_K_M-like", "guess")),
        # As FORMATS lists them: Qwen3.5-4B, 35B-A3B, early files.
        ((*Q4_K_M, ("attn_qkv", "q5_k"), ("ssm_out", "q8_0")), None, 15,
         ("UD-Q4_K_XL-like", "guess")),
        ((*Q4_K_M, ("attn_gate", "iq4_xs")), None, None, ("UD-Q4_K_XL-like", "guess")),
        ((("ffn_up", "q5_k"), ("ffn_down", "q5_k"), ("ssm_out", "mxfp4")), None, None,
         ("UD-Q5_K_XL-like", "guess")),
        # Rows that 256 does not divide have no other choice.
        ((*Q4_K_M, ("ffn_gate", "q5_0", 96), ("attn_k", "q8_0", 96)), None, 15,
         ("Q4_K_M", "general.file_type")),
        ((("attn_q", "q8_0"), ("ssm_alpha", "f32")), None, None, ("Q8_0", "uniform")),
        ((("attn_q", "bf16"), ("ffn_up", "bf16"), ("ssm_alpha", "f32")), None, None,
         ("BF16", "uniform")),
        ((("attn_q", "q8_0"), ("ffn_up", "mxfp4")), None, 38, ("MXFP4_MOE", "general.file_type")),
        ((("attn_q", "q8_0"), ("ffn_up", "iq4_nl")), None, None, ("mixed", "guess")),
    ],
)  # fmt: skip
def test_inspect_names_mixes(types, name, file_type, expected, tmp_path, capsys):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    if name:
        writer.add_name(name)
    if file_type is not None:
        writer.add_file_type(file_type)
    rng = np.random.default_rng(3)
    for i, (stem, qtype, *width) in enumerate(
        [("token_embd", "q6_k"), ("attn_norm", "f32"), *types]
    ):
        rows = 1 if "norm" in stem else 8
        blocks = random_blocks(qtype, rows, *(width or [512]), rng)
        key = f"{stem}.weight" if i == 0 else f"blk.0.{stem}.weight"
        data = blocks[0] if "norm" in stem else blocks
        writer.add_tensor(key, data, raw_dtype=gguf.GGMLQuantizationType[qtype.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    line, source, unsupported = mix_of(capsys, str(tmp_path / "m.gguf"))
    assert (line.split(":")[0], source) == expected
    assert unsupported == []


def test_inspect_shows_what_cannot_be_run(tmp_path, capsys):
    blocks = np.zeros((3, 2 * 66), np.uint8)
    path = write(
        tmp_path / "odd.gguf",
        arch="somethingnew",
        fields=[("general.name", "clear\x1b[2J the screen")],
        tensors=[
            ("strange.weight", blocks, gguf.GGMLQuantizationType.IQ2_XXS),
            ("plain.weight", np.zeros((4, 5), np.float32), None),
        ],
    )
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "somethingnew (cannot be loaded)" in out
    assert "iq2_xxs (unsupported)  3 x 512" in out
    assert "clear\\x1b[2J the screen" in out
    assert "\x1b" not in out
    line, source, unsupported = mix_of(capsys, path)
    assert (line.split(":")[0], source) == ("no layers", "guess")
    assert unsupported == [
        "architecture 'somethingnew' cannot be loaded",
        "IQ2_XXS has no kernels (1 tensor)",
    ]


def test_inspect_opens_a_split_set_from_any_shard(tmp_path, capsys):
    tensors = [(f"blk.{i}.w", np.full((2, 3), i, np.float32), None) for i in range(5)]
    write(tmp_path / "set.gguf", tensors=tensors, split_max_tensors=2)
    assert main(["inspect", str(tmp_path / "set-00003-of-00003.gguf"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in report["tensors"]] == [name for name, _, _ in tensors]
    assert [t["shard"] for t in report["tensors"]] == [0, 0, 1, 1, 2]
    assert len(report["paths"]) == 3


def test_inspect_of_a_file_without_anything(tmp_path, capsys):
    path = tmp_path / "empty.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    assert main(["inspect", str(path)]) == 0
    assert "not given" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["architecture"], report["tensors"], report["types"]) == (None, [], [])


# generate


def test_generate_prints_the_reference_text_and_nothing_else_in_pipes(gemma):
    result = run("generate", gemma, "--prompt", PROMPT, "--max-tokens", "8", "--dtype", "float32")
    tokens = gg.open(gemma).metadata["tokenizer.ggml.tokens"]
    assert result.stdout == text_of(GEMMA_IDS[:8], tokens) + "\n"
    assert (result.returncode, result.stderr) == (0, "")


def test_generate_stops_where_the_model_does(smollm2, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    args = ["generate", smollm2, "--prompt", "-", "--ignore-chat-template"]
    assert main([*args, "--dtype", "float32", "--verbose", "True"]) == 0
    out, err = capsys.readouterr()
    tokens = gg.open(smollm2).metadata["tokenizer.ggml.tokens"]
    # mlx-lm's detokenizer drops the space in front of the first word.
    assert out == text_of(SMOLLM2_IDS, tokens).removeprefix(" ") + "\n"
    assert "Prompt: 5 tokens," in err
    assert f"Generation: {len(SMOLLM2_IDS) + 1} tokens," in err


def test_generate_applies_the_chat_template(smollm2, capsys):
    args = ["--prompt", "What are you?", "--system-prompt", "You are a boat.", "-m", "6"]
    assert main(["generate", smollm2, *args]) == 0
    prompt = (
        "<|im_start|>system\nYou are a boat.<|im_end|>\n"
        "<|im_start|>user\nWhat are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    model, tokenizer = gg.load(smollm2)
    expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=6)
    assert capsys.readouterr().out == expected + "\n"


def test_a_rendered_template_gets_no_second_bos(smollm2):
    metadata = {
        **gg.open(smollm2).metadata,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    tokenizer = load_tokenizer(metadata)
    args = build_parser().parse_args(["generate", smollm2])
    ids = render_chat(tokenizer, [{"role": "user", "content": PROMPT}], args)
    assert ids == tokenizer.encode(PROMPT)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_template_that_refuses_is_a_value_error(smollm2):
    template = "{{ raise_exception('no system role') }}"
    tokenizer = load_tokenizer(gg.open(smollm2).metadata, chat_template=template)
    args = build_parser().parse_args(["generate", smollm2])
    with pytest.raises(ValueError, match=r"^\[chat_template\] .* Received no system role\.$"):
        render_chat(tokenizer, [{"role": "system", "content": "x"}], args)


def test_a_seed_fixes_what_is_sampled(smollm2, capsys):
    def sampled(seed):
        args = ["--temp", "1.5", "--top-p", "0.95", "--top-k", "50", "--min-p", "0.01", "-m", "4"]
        assert main(["generate", smollm2, "--prompt", "Hi", *args, "--seed", seed]) == 0
        return capsys.readouterr().out

    first = sampled("1")
    assert sampled("1") == first
    assert {sampled("2"), sampled("3")} != {first}


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_options_and_defaults_are_those_of_mlx_lm(name):
    module = __import__(f"mlx_lm.{name}", fromlist=["setup_arg_parser"])
    theirs = {o: a for a in module.setup_arg_parser()._actions for o in a.option_strings}
    args = vars(build_parser().parse_args([name, "model.gguf"]))
    # None decides --verbose by whether a terminal looks on; templates get {} for no arguments;
    # mlx_lm.chat has no place where XTC could be told apart at probability 0.
    different = {"verbose", "chat_template_config"}
    shared = {a.dest for a in theirs.values()} & args.keys() - different
    assert {"temp", "top_p", "max_tokens", "seed", "system_prompt", "max_kv_size"} <= shared
    for action in theirs.values():
        if action.dest in shared:
            assert args[action.dest] == action.default, action.dest


# chat


def talk(capsys, monkeypatch, path, *lines):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", path, "--max-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_chat_remembers_and_reads_only_what_is_new(smollm2, capsys, monkeypatch):
    fed = []
    original = mlx_lm.stream_generate

    def recording(model, tokenizer, prompt, **kwargs):
        fed.append((kwargs["prompt_cache"][0].offset, len(prompt)))
        return original(model, tokenizer, prompt, **kwargs)

    monkeypatch.setattr(mlx_lm, "stream_generate", recording)
    out = talk(capsys, monkeypatch, smollm2, "My name is Ada.", "h", "What is my name?")

    model, tokenizer = gg.load(smollm2)
    messages, expected, sizes = [], [], []
    for line in ("My name is Ada.", "What is my name?"):
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        responses = list(original(model, tokenizer, prompt, max_tokens=6))
        expected.append("".join(r.text for r in responses))
        messages.append({"role": "assistant", "content": expected[-1]})
        sizes.append(len(prompt))
    assert out == "".join(text + "\n" for text in expected)
    # What the cache holds and what is fed make up the conversation.
    assert [sum(pair) for pair in fed] == sizes
    assert fed[1][0] > sizes[0]


def test_chat_starts_over_and_quits(smollm2, capsys, monkeypatch):
    once = talk(capsys, monkeypatch, smollm2, "My name is Ada.")
    again = talk(capsys, monkeypatch, smollm2, "My name is Ada.", "r", "My name is Ada.", "q", "x")
    assert again == 2 * once


def test_chat_needs_a_template(gemma, capsys):
    assert "chat template" in fails(capsys, "chat", gemma)


# failing


@pytest.mark.parametrize("command", ["inspect", "generate", "chat"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a model", b"GGUF\x63\0\0\0" + bytes(16)])
def test_a_wrong_file_is_one_line(tmp_path, capsys, command, content):
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    assert "wrong.gguf" in fails(capsys, command, str(path))


def test_a_missing_file_a_directory_and_a_cut_file_are_one_line(tmp_path, smollm2, capsys):
    assert "nowhere.gguf" in fails(capsys, "inspect", str(tmp_path / "nowhere.gguf"))
    assert str(tmp_path) in fails(capsys, "inspect", str(tmp_path))
    cut = tmp_path / "cut.gguf"
    with open(smollm2, "rb") as whole:
        cut.write_bytes(whole.read(50 << 20))
    assert "cut.gguf" in fails(capsys, "generate", str(cut))


def test_an_unknown_architecture_is_one_line(tmp_path, capsys):
    path = write(tmp_path / "new.gguf", arch="somethingnew")
    assert "'somethingnew'" in fails(capsys, "generate", path)
    assert "'somethingnew'" in fails(capsys, "chat", path)


def test_an_error_of_a_process_has_exit_code_2_and_no_traceback(tmp_path):
    result = run("inspect", str(tmp_path / "nowhere.gguf"))
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("option", [["-m", "0"], ["--dtype", "int4"], ["--temp", "hot"]])
def test_wrong_options_are_usage_errors(option, capsys):
    with pytest.raises(SystemExit) as error:
        main(["generate", "model.gguf", *option])
    assert error.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet(smollm2):
    process = subprocess.Popen(
        command("inspect", smollm2), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    process.stderr.close()


def test_ctrl_c_is_quiet(smollm2):
    args = ("generate", smollm2, "--prompt", PROMPT, "--max-tokens", "-1", "--temp", "1")
    with subprocess.Popen(
        command(*args, "--ignore-chat-template", "--extra-eos-token", "<nothing>"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background job ignores the signal, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + signal.SIGINT, b"")


def test_a_terminal_sees_progress_and_statistics(smollm2):
    ours, theirs = os.openpty()
    args = ("generate", smollm2, "--prompt", PROMPT, "--ignore-chat-template", "-m", "2")
    result = subprocess.run(command(*args), stdout=subprocess.PIPE, stderr=theirs, timeout=120)
    os.close(theirs)
    seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert result.stdout == b"Paris.\n"
    assert "loading SmolLM2-135M-Instruct.Q4_1.gguf ..." in seen
    assert "Generation: 2 tokens," in seen
