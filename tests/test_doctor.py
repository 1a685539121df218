"""The doctor: it runs everything, finds what is wrong, and says so in its exit code."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from blocks import TYPES
from cli_support import run
from mlx_gguf import _ext, doctor, reference
from mlx_gguf.cli import main

QUICK = ["--backend", "cpu", "--types", "q4_k", "q8_0"]


@pytest.fixture(autouse=True)
def this_instruction_set(monkeypatch):
    """Others need a process each; one test runs them."""
    monkeypatch.setenv("MLX_GGUF_ISA", _ext.cpu_isa())


def test_everything_passes_here(monkeypatch, capsys):
    monkeypatch.delenv("MLX_GGUF_ISA")
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert report["failures"] == []
    ran = {s["name"]: s for s in report["sections"] if s["unavailable"] is None}
    assert {f"cpu {_ext.cpu_isa()}", "cpu portable"} <= set(ran)
    assert ({"metal", "cuda"} & set(ran)) == set(_ext.backends()) - {"cpu"}
    for section in ran.values():
        assert {row["qtype"] for row in section["types"]} == set(TYPES)
        for row in section["types"]:
            assert row["checks"] >= 3 * 25
            assert row["failed"] == 0
            assert set(row["errors"]) == {"float32", "float16", "bfloat16"}
            assert 0 < row["errors"]["float32"] < 2e-6
    for section in report["sections"]:
        assert section["name"] in ran or section["unavailable"]


def test_the_text_is_fit_for_an_issue():
    """In a process of its own: silent on standard error, plain text, everything to know."""
    done = run("doctor", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("mlx-gguf", "mlx", "nanobind", "Python", "system", "cpu", "threads", "q4_k"):
        assert word in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "checks passed" in done.stdout.splitlines()[-1]


def test_backends_that_are_not_here_are_named(monkeypatch, capsys):
    monkeypatch.setattr(_ext, "backends", lambda: ["cpu"])
    assert main(["doctor", "--types", "q4_0"]) == 0
    out = capsys.readouterr().out
    for name in ("metal", "cuda"):
        assert f"not checked: {name}: " in out


def test_a_crash_of_another_instruction_set_is_a_failure(monkeypatch):
    monkeypatch.delenv("MLX_GGUF_ISA")
    monkeypatch.setattr(_ext, "cpu_isas", lambda: ["crashing"])
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    report = doctor.diagnose(backends=["cpu"], types=["q4_0"])
    (failure,) = report.failures
    assert failure.backend == "cpu crashing"
    assert failure.problem.startswith("exit code 1")


def test_a_wrong_reference_fails_every_product(monkeypatch, capsys):
    decode = reference.decode
    monkeypatch.setattr(reference, "decode", lambda p, qtype: decode(p, qtype) * (1 + 1e-4))
    assert main(["doctor", *QUICK, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {f["qtype"] for f in report["failures"]} == {"q4_k", "q8_0"}
    rows = report["sections"][0]["types"]
    # 1e-4 is more than the rounding of float32 alone.
    exact = [f for f in report["failures"] if f["dtype"] == "float32"]
    assert len(exact) == sum(row["checks"] for row in rows) // 3
    assert sum(row["failed"] for row in rows) == len(report["failures"])


def spoil(monkeypatch, op, change):
    right = getattr(_ext, op)
    monkeypatch.setattr(_ext, op, lambda *args, **kw: change(right(*args, **kw), *args))


@pytest.mark.parametrize(
    ("op", "change", "paths"),
    [
        (
            "quantized_matmul",  # the last output of a batch of three
            lambda y, x, *rest: y.at[-1, -1].add(1) if x.shape[0] == 3 else y,
            {"gemv M=3"},
        ),
        (
            "quantized_matmul",  # a bit of a batch, within the tolerance
            lambda y, x, *rest: y.at[0].multiply(1 + 2**-23) if x.shape[0] == 5 else y,
            {"gemv M=5"},
        ),
        ("quantized_addmm", lambda y, *args: y + 1, {"addmm M=1", "addmm M=33", "addmm M=513"}),
        (
            "gather_qmm",
            lambda y, *args: y[::-1],
            {"gather", "sorted gather", "gather x @ W", "sorted gather x @ W"},
        ),
        ("dequantize", lambda y, w, *rest: y if len(w) > 7 else y * 2, {"embedding"}),
        ("dequantize", lambda y, *args: y.at[0, 0].add(float("nan")), {"dequantize", "embedding"}),
    ],
)
def test_a_wrong_kernel_is_found_where_it_is(op, change, paths, monkeypatch, capsys):
    spoil(monkeypatch, op, change)
    assert main(["doctor", *QUICK[:2], "--types", "q4_k"]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = {line.split(": ")[1] for line in lines if line.startswith("FAILED")}
    start = f"cpu {_ext.cpu_isa()} q4_k float32 "
    assert {text.removeprefix(start) for text in found if text.startswith(start)} == paths
    assert lines[-1].endswith("checks failed")


def test_a_kernel_that_does_not_compile_is_a_failure(monkeypatch, capsys):
    def fails(y, x, *rest):
        if x.shape[0] == 33:
            raise RuntimeError("Unable to build\nmetal library")
        return y

    spoil(monkeypatch, "quantized_matmul", fails)
    assert main(["doctor", *QUICK]) == 1
    out = capsys.readouterr().out
    assert "float16 gemm M=33: Unable to build metal library" in out


def test_a_plan_that_is_wrong_is_found_by_its_name(monkeypatch, capsys):
    def change(y, x, w, *rest):
        if x.shape[0] > 8:
            return y
        plan = _ext.plan_for("cpu", "q4_k", str(x.dtype)[9:], x.shape[0], w.shape[0], x.shape[1])
        return -y if plan.rows == 64 else y

    spoil(monkeypatch, "quantized_matmul", change)
    assert main(["doctor", "--backend", "cpu", "--types", "q4_k", "--json"]) == 1
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert len(failures) == 3
    assert all(" rows=64 " in f["path"] for f in failures)


def test_stored_plans_are_back_afterwards():
    plan = "gemv form=block rows=32 columns=1 simdgroups=1 split_k=0"
    _ext.set_plans("cpu", "q4_k", "float32", 8, 256, dict.fromkeys((1, 2, 4, 8), plan))
    before = _ext.stored_plans()
    try:
        doctor.diagnose(backends=["cpu"], types=["q4_0"])
        assert _ext.stored_plans() == before
    finally:
        _ext.clear_plans()


def test_the_checks_run_every_metal_kernel():
    assert doctor.sample_kernels() == set(_ext.metal_kernels())


def test_an_unknown_type_is_one_line(capsys):
    assert main(["doctor", "--types", "q1_k"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mlx-gguf: error: [doctor] Expected types of f32 f16 ")
    assert err.endswith("Received 'q1_k'.\n")


def test_judge_knows_a_rounding_from_an_error():
    rng = np.random.default_rng(0)
    ref = rng.standard_normal((8, 64))
    terms = abs(ref)
    for name, (unit, _) in reference.DTYPES.items():
        y = mx.array(ref.astype(np.float32)).astype(getattr(mx, name))
        assert reference.judge(y, ref, terms, 2e-6).problem is None
        off = y.at[3, 5].multiply(1 + 8 * unit + 8e-6)
        assert "the first at (3, 5)" in reference.judge(off, ref, terms, 2e-6).problem
        assert "shape" in reference.judge(y[:1], ref, terms, 2e-6).problem
    drift = mx.array((ref * (1 + 3e-6)).astype(np.float32))
    assert reference.judge(drift, ref, 2 * terms, 2e-6).problem.startswith("relative error")
