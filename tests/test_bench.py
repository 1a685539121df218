"""The roofline bench: what it measures, prints, stores and draws, and that it fails loudly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_gguf import _ext, bench, bench_ggml, bench_plot, bench_report, bench_rivals, roofline
from mlx_gguf.cli import main
from mlx_gguf.reference import RandomWeights
from mlx_gguf.tune import Matrix

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gemv.py"
HEADER = "kernel weights N x K M x us GB/s time / floor flop/byte GFLOP/s error"
needs_matplotlib = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
needs_ggml = pytest.mark.skipif(
    not bench_ggml.installed(), reason="llama-cpp-python is not installed"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure little: these tests are not about times."""
    for name, value in (("_COLD_BYTES", 1 << 18), ("_SAMPLE_SECONDS", 1e-5), ("_READ_BYTES", 1)):
        monkeypatch.setattr(bench, name, value)


BACKENDS = " or ".join(_ext.backends())


def run(*args):
    return main(
        ["bench", "--backend", "cpu", "--rounds", "2", "--shapes", "96x512", *map(str, args)]
    )


def found(*qtypes, N=96, K=512, **options):
    return bench.run([Matrix(q, N, K) for q in qtypes], rounds=2, **options)


# What is measured


def test_every_combination_is_a_row():
    rows = found("q4_k", "q8_0", rows=(1, 3), dtypes=("float16", "float32")).rows
    assert [(r.weights, r.dtype, r.M) for r in rows] == [
        (qtype, dtype, M)
        for qtype in ("q4_k", "q8_0")
        for dtype in ("float16", "float32")
        for M in (1, 3)
    ]
    assert all(r.kernel == "mlx-gguf" and r.seconds > 0 and r.over_floor > 0 for r in rows)


def test_figures_follow_from_bytes_operations_and_seconds():
    row = bench_report.Row("k", "q4_k", 4096, 4096, 2, "float16", 9437184, 1, 1e-3, 5e-4, 2, 0)
    assert row.gb_per_s == pytest.approx(9.437184)
    assert row.gflop_per_s == pytest.approx(67.108864)
    assert row.intensity == pytest.approx(row.gflop_per_s / row.gb_per_s)


@pytest.mark.parametrize("qtype", [f.name for f in _ext.formats() if f.supported])
def test_every_type_can_be_measured(qtype):
    (row,) = found(qtype, dtypes=("float32",)).rows
    assert row.error <= _ext.find_format(qtype).tolerance
    assert row.nbytes == 96 * _ext.find_format(qtype).row_bytes(512)


def test_a_launch_takes_weights_that_the_last_one_did_not(monkeypatch):
    monkeypatch.setattr(bench, "_SAMPLE_SECONDS", 1.0)
    seen = []
    matmul = _ext.quantized_matmul

    def watch(x, w, qtype, stream):
        seen.append(id(w))
        return matmul(x, w, qtype, stream=stream)

    monkeypatch.setattr(_ext, "quantized_matmul", watch)
    (row,) = found("q8_0").rows
    copies = len(set(seen))
    assert row.launches == copies >= (1 << 18) / row.nbytes
    assert all(len(set(seen[i : i + copies])) == copies for i in range(2, len(seen) - copies))


@pytest.mark.skipif("cuda" not in _ext.backends(), reason="needs CUDA")
def test_on_cuda_products_of_many_rows_may_round_the_weights():
    rows = found("q4_k", N=1024, K=1024, backend="cuda", rows=(1, 8, 256)).rows
    assert [row.M for row in rows] == [1, 8, 256]
    assert rows[0].error < rows[2].error


def test_the_default_dtype_is_that_of_a_loaded_model():
    assert [r.dtype for r in found("q4_k").rows] == ["float32"]


def test_the_rows_of_x_that_are_checked_reach_both_ends():
    assert bench.checked_rows(1) == [0]
    assert bench.checked_rows(4) == [0, 1, 2, 3]
    many = bench.checked_rows(512)
    assert (many[0], many[-1], len(many)) == (0, 511, 8)


def test_the_roofs_are_those_of_the_instruction_set():
    peaks = roofline.find_device("cpu").peaks()
    assert next(iter(peaks)) == "float32 multiply-adds"
    assert ("int8 dot products" in peaks) == (_ext.cpu_isa() in ("avx512vnni", "avx512amx"))
    assert all(1 < peak < 1e6 for peak in peaks.values())  # GFLOP/s: the unit is right


# Wrong results


def spoil(monkeypatch, wrong):
    matmul = _ext.quantized_matmul

    def spoiled(x, w, qtype, stream):
        return wrong(matmul(x, w, qtype, stream=stream))

    monkeypatch.setattr(_ext, "quantized_matmul", spoiled)


def test_a_wrong_number_is_an_error_and_no_table(monkeypatch, capsys):
    one = mx.zeros((1, 96)).at[0, 95].add(1e-2)
    spoil(monkeypatch, lambda y: y + one)
    assert run("--types", "q4_k") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "[bench] Expected q4_k 96 x 512 with 1 row of float32 as in float64." in err
    assert "1 of 96 wrong, the first at (0, 95)" in err


def test_a_wrong_last_row_of_many_is_an_error(monkeypatch):
    last = mx.zeros((40, 96)).at[39, 0].add(1e-2)
    spoil(monkeypatch, lambda y: y + last)
    with pytest.raises(bench.WrongResultError, match="1 of 768 wrong"):
        found("q4_k", rows=(40,))


def test_a_launch_that_differs_from_the_others_is_an_error(monkeypatch):
    monkeypatch.setattr(bench, "_SAMPLE_SECONDS", 1.0)
    calls = []

    def wrong(y):
        calls.append(y)
        return y + 1 if len(calls) == 5 else y  # not the first launch of the first long sample

    spoil(monkeypatch, wrong)
    with pytest.raises(bench.WrongResultError, match="the same result of every launch of mlx-gguf"):
        found("q8_0")


# Rivals


def test_mlx_products_are_rivals_with_errors_of_their_own():
    report = found("q4_k", compare=True, dtypes=("float32",))
    rivals = {(r.kernel, r.weights, r.dtype): r for r in report.rows if "mx." in r.kernel}
    assert list(rivals) == [
        ("mx.quantized_matmul", "4-bit g32", "float32"),
        ("mx.quantized_matmul", "4-bit g64", "float32"),
        ("mx.matmul", "float16", "float16"),
        ("mx.matmul", "bfloat16", "bfloat16"),
    ]
    limits = (1e-5, 1e-5, 2e-3, 1e-2)
    assert all(0 < r.error < most for r, most in zip(rivals.values(), limits, strict=True))
    assert rivals["mx.quantized_matmul", "4-bit g32", "float32"].nbytes == 96 * 512 * 6 // 8


def test_a_rival_that_takes_too_long_is_skipped_and_named(monkeypatch, capsys):
    monkeypatch.setattr(bench_rivals, "_LONGEST_SECONDS", 0.0)
    monkeypatch.setattr(bench_ggml, "installed", lambda: False)
    assert run("--types", "q4_k", "--compare") == 0
    skipped = [s for s in capsys.readouterr().out.splitlines() if s.startswith("skipped: ")]
    assert len(skipped) == 4
    assert skipped[0].startswith(
        "skipped: mx.quantized_matmul 4-bit g32, 96 x 512, 1 row of float32: one product would "
    )


@needs_ggml
@pytest.mark.parametrize("qtype", ["q4_k", "q6_k", "q5_0"])
@pytest.mark.parametrize("M", [1, 5])
def test_ggml_gets_the_same_weights(qtype, M):
    matrix = Matrix(qtype, 64, 512)
    rng = np.random.default_rng(0)
    weights = RandomWeights(qtype, (64, 512), rng)
    with bench_ggml.Weights(matrix, weights, [mx.array(weights.packed)] * 2) as rival:
        contender = rival.contender(M, rng)
        launch = contender.prepare([1, 0])
        launch.run()
        # Its activations have 8 bits.
        assert all(1e-5 < contender.error(y) < 2e-2 for y in launch.results())


# What is printed, stored and drawn


def test_the_table(capsys):
    assert run("--types", "Q4_K", "iq4_xs", "--rows", "1", "2", "--dtype", "bfloat16") == 0
    out, err = capsys.readouterr()
    about, header, *rows, memory, compute, ridge = filter(None, out.splitlines())
    assert err == ""  # silent in a pipe
    assert about.startswith("cpu: ")
    assert "-byte pages" in about
    assert " ".join(header.split()) == HEADER
    assert [row.split()[:6] for row in rows] == [
        ["mlx-gguf", qtype, "96", "x", "512", M] for qtype in ("q4_k", "iq4_xs") for M in "12"
    ]
    assert memory.startswith("memory ")
    assert compute.startswith("compute ")
    assert "float32 multiply-adds" in compute
    assert ridge.startswith("ridge ")


def test_the_json_has_all_figures_and_circumstances(tmp_path):
    path = tmp_path / "bench.json"
    assert run("--types", "q4_k", "--json", path) == 0
    stored = json.loads(path.read_text())
    assert {"date", "device", "threads", "page_size", "mlx", "mlx_gguf"} <= set(stored)
    (row,) = stored["rows"]
    assert row["flop_per_byte"] == pytest.approx(2 / (4.5 / 8))
    assert row["gb_per_s"] == pytest.approx(row["nbytes"] / row["seconds"] / 1e9)
    assert stored["memory_roof_gb_per_s"] == stored["reads_gb_per_s"][0]


@needs_matplotlib
@pytest.mark.parametrize("rows", [("1",), ("1", "64")])
def test_the_picture(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(bench_ggml, "installed", lambda: False)
    path = tmp_path / "roofline.svg"
    assert run("--types", "q4_k", "q8_0", "--rows", *rows, "--plot", path) == 0
    assert path.stat().st_size > 5000


@needs_matplotlib
def test_every_point_has_a_label_and_the_ridge_is_marked(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    texts = []
    annotate = Axes.annotate
    monkeypatch.setattr(
        Axes,
        "annotate",
        lambda self, text, *a, **k: texts.append(text) or annotate(self, text, *a, **k),
    )
    report = bench_report.to_json(found("q4_k", "q8_0", rows=(1, 4)))
    bench_plot.draw(report, str(tmp_path / "roofline.png"))
    assert {"Q4_K M=1", "Q4_K M=4", "Q8_0 M=1", "Q8_0 M=4"} <= set(texts)
    assert any(text.startswith("ridge, ") for text in texts)
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


# Wrong arguments


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--backend", "tpu"), f"Expected a backend of this machine, {BACKENDS}. Received 'tpu'."),
        (("--types", "q9_k"), "[bench] Expected TYPE:NxK with a type that has kernels"),
        (("--types", "q4_k", "--shapes", "64x100"), "Received 'q4_k:64x100'."),
    ],
)
def test_wrong_arguments_are_one_line(args, message, capsys):
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err


def test_without_matplotlib_the_extra_is_named_before_measuring(monkeypatch, capsys):
    monkeypatch.setattr(bench_plot, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "run", lambda *args, **options: pytest.fail("measured first"))
    assert run("--plot", "roofline.png") == 2
    assert "pip install 'mlx-gguf[plot]'" in capsys.readouterr().err


def test_the_script_has_the_same_options():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    options = set(re.findall(r"--[a-z]+", done.stdout)) - {"--help"}
    assert options == set(re.findall(r"`(--[a-z]+)", SCRIPT.read_text()))
