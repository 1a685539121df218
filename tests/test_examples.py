"""The examples run as they say and print what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_gguf as gg
from cli_support import GEMMA_IDS, PROMPT, text_of
from ranks import free_ports

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *args):
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_decode_prints_the_reference_text(gemma):
    text = text_of(GEMMA_IDS[:8], gg.open(gemma).metadata["tokenizer.ggml.tokens"])
    assert run("decode.py", gemma, "--max-tokens", "8") == f"{PROMPT}{text}\n"


def test_decode_stops_at_the_end_of_a_turn(smollm2):
    assert run("decode.py", smollm2, "--max-tokens", "60") == (
        f"{PROMPT} Paris.\n\nThe answer is: 2018-01-22 12:12:53.\n"
    )


@pytest.mark.parametrize(("fixture", "qtypes"), [("gemma", "q5_0 q6_k"), ("smollm2", "q4_1")])
def test_custom_op_agrees_with_dequantised_weights(fixture, qtypes, request):
    out = run("custom_op.py", request.getfixturevalue(fixture))
    errors = [float(e) for e in re.findall(r"error of the .*: (\S+)", out)]
    assert len(errors) == 2
    assert max(errors) < 1e-5
    assert "rows equal their solo runs: True" in out
    assert all(qtype in out for qtype in qtypes.split())


def test_quant_linear_trains_around_a_packed_layer_and_loads_it_again(gemma):
    out = run("quant_linear.py", gemma)
    first, last = (float(x) for x in re.findall(r"loss (\S+)", out))
    assert last < first / 2
    assert "QuantLinear(input_dims=640, output_dims=2048, bias=False, qtype=q5_0)" in out
    assert "trainable parameters: 21504" in out
    assert "loaded again, equal: True" in out


def test_sharded_decode_prints_what_one_rank_prints(smollm2):
    """By the command of its docstring; three ranks, as the model has three key heads."""
    launch = ["-c", "from mlx._distributed_utils.launch import main; main()", "-n", "3"]
    launch += ["--backend", "ring", "--starting-port", str(free_ports(1)[0]), "--"]
    example = [sys.executable, str(EXAMPLES / "sharded_decode.py"), smollm2, "--max-tokens", "12"]
    done = subprocess.run(
        [sys.executable, *launch, *example],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"MLX_GGUF_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == run("sharded_decode.py", smollm2, "--max-tokens", "12")
    assert done.stdout.startswith(f"{PROMPT} Paris.")


def test_the_default_file_is_the_demo_model(gemma):
    assert "blk.1.ffn_down.weight: q6_k" in run("custom_op.py", "--layer", "1")
