"""Plans: what may be stored, what storing changes, and finding the fastest by measuring."""

from __future__ import annotations

import json
import threading
import warnings

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import TYPES, dequantize64, random_blocks, row_bytes
from mlx_gguf import _ext, plans, reference, tune
from mlx_gguf.cli import main
from subprocesses import run
from test_cli import write

ROWS = (1, 2, 4, 8)
CPU = "gemv form=block rows={} columns=1 simdgroups=1 split_k=0"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, and no stored plans before and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MLX_GGUF_TUNED", raising=False)
    _ext.clear_plans()
    yield tmp_path / "cache" / "mlx-gguf" / "plans.json"
    _ext.clear_plans()


@pytest.fixture
def quick(monkeypatch):
    """Measure little: these tests are not about times."""
    monkeypatch.setattr(tune, "cold_bytes", lambda backend: 1 << 16)


def plan_of(M, qtype="q4_k", dtype="float32", N=64, K=256, **options):
    return str(_ext.plan_for("cpu", qtype, dtype, M, N, K, **options))


def use(plan, N=64, K=256, *, backend="cpu", qtype="q4_k", dtype="float32", **rows):
    by_rows = dict.fromkeys(ROWS, plan) | {int(k[1:]): v for k, v in rows.items()}
    _ext.set_plans(backend, qtype, dtype, N, K, by_rows)


# What may be stored


@pytest.mark.parametrize("backend", ["cpu", "metal"])
@pytest.mark.parametrize("qtype", ["q4_k", "q8_0", "iq4_xs", "q3_k", "f16"])
def test_every_plan_survives_being_written_and_read(backend, qtype):
    stored = {}
    for i, plan in enumerate(_ext.plan_candidates(backend, qtype)):
        if plan.kernel == "dequantize":
            continue
        use(str(plan), N=i + 1, backend=backend, qtype=qtype)
        stored[i + 1] = str(plan)
    found = {row["N"]: row["plans"] for row in _ext.stored_plans()}
    assert found == {N: dict.fromkeys(ROWS, text) for N, text in stored.items()}
    before = _ext.stored_plans()
    text = json.dumps(before)
    _ext.clear_plans()
    assert _ext.stored_plans() == []
    for row in json.loads(text):
        row["plans"] = {int(rows): plan for rows, plan in row["plans"].items()}
        _ext.set_plans(**row)
    assert _ext.stored_plans() == before


def test_candidates_are_told_apart_by_their_text():
    for backend in ("cpu", "metal"):
        for qtype in TYPES:
            texts = [str(plan) for plan in _ext.plan_candidates(backend, qtype)]
            assert len(set(texts)) == len(texts) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "vulkan"}, "Expected a backend of cpu or metal. Received 'vulkan'."),
        ({"qtype": "q1_k"}, "Expected a tensor type of"),
        ({"dtype": "int8"}, "Expected a dtype of float16, bfloat16 or float32. Received 'int8'."),
        ({"plans": {}}, "Expected at least one plan. Received none."),
        ({"plans": {1: CPU.format(5)}}, f"plan of cpu for q4_k. Received '{CPU.format(5)}'."),
        ({"plans": {1: CPU.format(16) + " "}}, "Expected a plan of cpu for q4_k."),
        ({"plans": {1: "gemm tile=32x32 transpose=1"}}, "Expected a plan of cpu for q4_k."),
        ({"plans": {0: CPU.format(16)}}, "power of two of at most 1024. Received 0."),
        ({"plans": {3: CPU.format(16)}}, "power of two of at most 1024. Received 3."),
        ({"plans": {2048: CPU.format(16)}}, "power of two of at most 1024. Received 2048."),
        ({"plans": {1: CPU.format(16)}}, "for 1, 2, 4 and 8 rows of x. Received none for 2."),
    ],
)
def test_what_is_no_plan_is_refused_and_changes_nothing(change, message):
    use(CPU.format(32))
    before = _ext.stored_plans()
    good = before[0] | {"plans": dict.fromkeys(ROWS, CPU.format(8))}
    with pytest.raises(ValueError, match=r"^\[tuned\] Expected") as caught:
        _ext.set_plans(**(good | change))
    assert message in str(caught.value)
    assert _ext.stored_plans() == before
    _ext.set_plans(**good)


GEMV = "gemv form={} rows={} columns={} simdgroups={} split_k={}"


@pytest.mark.parametrize(
    ("one", "eight", "allowed"),
    [
        (("subnormal", 4, 1, 2, 0), ("subnormal", 2, 8, 4, 0), True),
        (("magic", 4, 1, 4, 1), ("magic", 2, 8, 4, 1), True),
        (("subnormal", 4, 1, 2, 0), ("magic", 2, 8, 2, 0), False),
        (("subnormal", 4, 1, 4, 0), ("subnormal", 2, 8, 4, 1), False),
        (("subnormal", 4, 1, 4, 1), ("subnormal", 2, 8, 2, 1), False),
    ],
)
def test_all_batches_of_a_gemv_sum_in_one_order(one, eight, allowed):
    one, eight = GEMV.format(*one), GEMV.format(*eight)
    if allowed:
        use(one, backend="metal", m8=eight)
        assert _ext.stored_plans()[0]["plans"] == {1: one, 2: one, 4: one, 8: eight}
    else:
        with pytest.raises(ValueError, match="same order for every batch") as caught:
            use(one, backend="metal", m8=eight)
        assert f"'{one}'" in str(caught.value)
        assert f"'{eight}'" in str(caught.value)


def test_plans_of_one_problem_are_of_one_kernel():
    gemm = "gemm tile=32x32 transpose={}"
    with pytest.raises(ValueError, match="one kernel and direction"):
        use(GEMV.format("magic", 2, 1, 2, 0), backend="metal", m64=gemm.format(1))
    by_rows = {64: gemm.format(1), 128: gemm.format(0)}
    with pytest.raises(ValueError, match="one kernel and direction"):
        _ext.set_plans("metal", "q4_k", "float16", 64, 256, by_rows)


# What storing changes


def test_a_stored_plan_is_used_for_its_problem_alone():
    default = plan_of(1)
    use(CPU.format(128), m8=CPU.format(4))
    assert [plan_of(M) for M in (1, 2, 3, 4)] == [CPU.format(128)] * 4
    assert [plan_of(M) for M in (5, 8)] == [CPU.format(4)] * 2
    assert plan_of(9) == default
    assert plan_of(1, tuned=False) == default
    for other in ({"qtype": "q5_k"}, {"dtype": "float16"}, {"N": 65}, {"K": 512}):
        assert plan_of(1, **other) == default, other
    _ext.clear_plans()
    assert plan_of(1) == default


def test_plan_for_refuses_what_is_no_problem():
    with pytest.raises(ValueError, match=r"\[plan_for\] Expected M, N and K of at least 1"):
        plan_of(0)
    if "metal" not in _ext.backends():
        with pytest.raises(RuntimeError, match="Expected a backend of this machine"):
            _ext.plan_for("metal", "q4_k", "float16", 1, 64, 256)


@pytest.mark.parametrize("qtype", ["q4_k", "q8_0", "mxfp4", "f16"])
def test_a_plan_changes_no_bit(qtype):
    rng = np.random.default_rng(0)
    N, K = 151, 3 * max(TYPES[qtype], 32)  # more rows than one task takes, and a tail
    packed = random_blocks(qtype, 2 * N, K, rng)
    w = mx.array(packed).reshape(2, N, -1)
    x = mx.array(rng.uniform(-1, 1, (70, K)).astype(np.float32))
    ref = np.array(x).astype(np.float64) @ dequantize64(packed[:N], qtype).T
    experts = mx.array(rng.integers(0, 2, 70))

    def results():
        with mx.stream(mx.cpu):
            out = [gg.quantized_matmul(x[:M], w[0], qtype) for M in (1, 2, 8, 70)]
            out.append(gg.quantized_addmm(x[:, :1], x, w[0], qtype, 0.5, 2.0))
            out.append(gg.gather_qmm(x[:, None], w, qtype, None, experts))
            return [np.array(y) for y in out]

    default = results()
    assert np.linalg.norm(default[3] - ref) <= 2e-6 * np.linalg.norm(ref)
    for plan in map(str, _ext.plan_candidates("cpu", qtype)):
        use(plan, N, K, qtype=qtype, m16=plan, m64=plan, m128=plan)
        assert str(_ext.plan_for("cpu", qtype, "float32", 70, N, K)) == plan
        for y, expected in zip(results(), default, strict=True):
            assert y.tobytes() == expected.tobytes(), plan


def test_plans_may_be_stored_while_products_run():
    w = mx.array(random_blocks("q4_k", 64, 256, np.random.default_rng(0)))
    x = mx.ones((1, 256))
    right = gg.quantized_matmul(x, w, "q4_k", stream=mx.cpu)
    mx.eval(right)
    done = threading.Event()

    def change():
        while not done.is_set():
            for rows in (4, 64):
                use(CPU.format(rows))
            _ext.clear_plans()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            y = gg.quantized_matmul(x, w, "q4_k", stream=mx.cpu)
            assert mx.array_equal(y, right)
    finally:
        done.set()
        thread.join()


# Loading


@pytest.fixture
def stored(cache):
    """A file with a plan for this machine that no rule would choose."""
    product = {"qtype": "q4_k", "dtype": "float32", "N": 64, "K": 256}
    plans.store("cpu", [product | {"plans": dict.fromkeys(ROWS, CPU.format(128))}])
    return cache


PLAN_IN_USE = """
import warnings; warnings.simplefilter("error")
import mlx_gguf
from mlx_gguf import _ext
print(_ext.plan_for("cpu", "q4_k", "float32", 1, 64, 256).rows, len(_ext.stored_plans()))
"""


def test_importing_the_package_puts_stored_plans_to_use(stored):
    assert run(PLAN_IN_USE).split() == ["128", "1"]
    rows, tuned = run(PLAN_IN_USE, MLX_GGUF_TUNED="0").split()
    assert tuned == "0"
    assert rows != "128"
    stored.unlink()
    assert run(PLAN_IN_USE).split() == [rows, "0"]


@pytest.mark.parametrize("name", ["device", "mlx", "mlx_gguf", "backend"])
def test_plans_of_another_machine_or_version_are_not_used(name, stored):
    content = json.loads(stored.read_text())
    content["devices"][0][name] += " of old"
    stored.write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plans.load()
    assert _ext.stored_plans() == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: '{"devices": {}, "devices": 3}',
        lambda text: text.replace("rows=128", "rows=127", 1),
        lambda text: text.replace('"N": 64', '"N": "many"'),
        lambda text: text.replace('"1":', '"one":'),
        lambda text: text.replace('"dtype"', '"dtypes"'),
        lambda text: "\udcff",
    ],
)
def test_a_broken_file_is_one_warning_and_no_plans(spoil, stored):
    stored.write_bytes(spoil(stored.read_text()).encode("utf-8", "surrogateescape"))
    with pytest.warns(RuntimeWarning, match=r"^\[tuned\] Expected plans that") as caught:
        plans.load()
    assert len(caught) == 1
    assert str(stored) in str(caught[0].message)
    assert _ext.stored_plans() == []


def test_storing_keeps_what_was_found_for_others_and_replaces_the_same(stored):
    content = json.loads(stored.read_text())
    other = content["devices"][0] | {"device": "another"}
    stored.write_text(json.dumps({"devices": [other, *content["devices"]]}))
    product = {"qtype": "q4_k", "dtype": "float32", "N": 64, "K": 256}
    new = [
        product | {"plans": dict.fromkeys(ROWS, CPU.format(8))},
        product | {"N": 96, "plans": dict.fromkeys(ROWS, CPU.format(4))},
    ]
    assert plans.store("cpu", new) == stored
    devices = json.loads(stored.read_text())["devices"]
    assert devices[0] == other
    assert len(devices) == 2
    plans.load()
    assert [row["N"] for row in _ext.stored_plans()] == [64, 96]
    assert (plan_of(1), plan_of(1, N=96)) == (CPU.format(8), CPU.format(4))
    assert list(stored.parent.iterdir()) == [stored]


# Measuring


def test_tuning_a_file_stores_the_winners_and_uses_them(tmp_path, cache, quick, capsys):
    rng = np.random.default_rng(0)
    tensors = [
        (f"blk.{i}.{name}.weight", random_blocks(qtype, N, K, rng), _ggml(qtype))
        for i in (0, 1)
        for name, qtype, N, K in [("a", "q4_k", 33, 256), ("b", "q8_0", 64, 96)]
    ]
    tensors.append(("norm.weight", np.ones(7, np.float32), None))
    tensors.append(("blk.0.c.weight", np.ones((5, 7), np.float32), None))
    path = write(tmp_path / "model.gguf", tensors=tensors)
    assert main(["tune", path, "--backend", "cpu", "--repetitions", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    rows = [(c["matrix"]["qtype"], c["matrix"]["N"], c["M"]) for c in report["choices"]]
    assert rows == [(q, N, M) for q, N in (("q8_0", 64), ("q4_k", 33)) for M in ROWS]
    assert (report["left"], report["stored"]) == (0, str(cache))
    for c in report["choices"]:
        matrix = c["matrix"]
        legal = list(map(str, _ext.plan_candidates("cpu", matrix["qtype"])))
        assert {c["now"], c["best"]} <= set(legal)
        assert c["seconds"] > 0 < c["floor"]
        assert c["rejected"] == {}
        query = ("cpu", matrix["qtype"], "float32", c["M"], matrix["N"], matrix["K"])
        assert str(_ext.plan_for(*query)) == c["best"]
    in_use = _ext.stored_plans()
    _ext.clear_plans()
    plans.load()
    assert _ext.stored_plans() == in_use
    assert len(in_use) == 2


def test_a_dry_run_stores_nothing_and_prints_a_table(cache, quick, capsys):
    args = ["--shapes", "q6_k:20x512", "Q4_0:8x32", "q6_k:20x512"]
    options = ["--backend", "cpu", "--dtype", "float16", "--repetitions", "1", "--dry-run"]
    assert main(["tune", *args, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:5] == ["type", "N", "x", "K", "M"]
    heads = [line.split()[:5] for line in lines[3:11]]
    expected = [["q6_k", "20", "x", "512"]] * 4 + [["q4_0", "8", "x", "32"]] * 4
    assert heads == [[*row, str(M)] for row, M in zip(expected, ROWS * 2, strict=True)]
    assert lines[-1] == "nothing stored"
    assert not cache.exists()


def test_the_time_limit_leaves_matrices_unmeasured(cache, quick, capsys):
    args = ["--shapes", "q4_0:8x32", "--backend", "cpu", "--time-limit", "0"]
    assert main(["tune", *args]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("nothing stored\n")
    assert err == "mlx-gguf: 1 of 1 matrices left: out of time\n"
    assert not cache.exists()


def test_a_wrong_plan_never_wins(quick, monkeypatch):
    """A kernel that is wrong with one plan, and too fast to be true."""
    wrong, right = CPU.format(4), _ext.quantized_matmul

    def spoilt(x, w, qtype, **options):
        y = right(x, w, qtype, **options)
        query = ("cpu", qtype, "float32", x.shape[0], w.shape[0], 256)
        return y + 1 if str(_ext.plan_for(*query)) == wrong else y

    monkeypatch.setattr(_ext, "quantized_matmul", spoilt)
    matrix = tune.Matrix("q4_k", 64, 256)
    (choices,) = tune.tune([matrix], backend="cpu", dtype="float32", repetitions=1)
    for choice in choices:
        assert choice.best != wrong
        assert list(choice.rejected) == [wrong]
        assert "wrong, the first at" in choice.rejected[wrong]


def test_tuning_ends_in_an_error_when_nothing_is_right(quick, monkeypatch):
    decode = reference.decode
    monkeypatch.setattr(reference, "decode", lambda packed, qtype: -decode(packed, qtype))
    matrix = tune.Matrix("q4_k", 64, 256)
    with pytest.raises(ValueError, match=r"\[tune\] Expected a plan with right results"):
        list(tune.tune([matrix], backend="cpu", dtype="float32", repetitions=1))
    assert plan_of(1) == plan_of(1, tuned=False)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Expected either FILE or --shapes"),
        (["--shapes", "q4_k"], "such as q4_k:4096x4096. Received 'q4_k'."),
        (["--shapes", "q4_k:8x100"], "K in whole blocks"),
        (["--shapes", "iq1_s:8x256"], "a type that has kernels"),
        (["--shapes", "q4_k:0x256"], "[tune] Expected TYPE:NxK"),
    ],
)
def test_wrong_arguments_are_one_line(args, message, capsys):
    assert main(["tune", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def _ggml(qtype):
    import gguf

    return gguf.GGMLQuantizationType[qtype.upper()]


def test_random_weights_are_what_gguf_py_decodes():
    rng = np.random.default_rng(0)
    for qtype, size in TYPES.items():
        weights = reference.RandomWeights(qtype, (5, 3 * size), rng)
        assert weights.packed.shape == (5, row_bytes(qtype, 3 * size))
        w = dequantize64(weights.packed, qtype)
        assert np.array_equal(weights.values(), w)
        x = rng.uniform(-1, 1, (2, 3 * size))
        ref, terms = weights.product(x)
        np.testing.assert_allclose(ref, x @ w.T, rtol=0, atol=1e-12)
        np.testing.assert_allclose(terms, abs(x) @ abs(w).T, rtol=1e-12)
