"""The device code of metal/, executed in the emulator against gguf-py in float64."""

import shutil
import subprocess

import numpy as np
import pytest

import metal_kernels_traffic as traffic
from blocks import TYPES, dequantize64, random_blocks, row_bytes, with_bad_block
from metal_emulator import EmulatorError
from metal_emulator.build import preprocess
from metal_kernels_support import (
    METAL,
    PARAMS,
    ROOT,
    SOURCE,
    TOLERANCE,
    Kernel,
    choose,
    kernels,
    library,
    library_of,
    narrow,
    random_problem,
    widen,
)

pytest.importorskip("ziglang")

# Blocks of these are loaded in words; the others take a row from any 2-byte boundary.
ALIGNMENT = {"f32": 4, "q4_k": 4, "q5_k": 4, "iq4_xs": 4, "mxfp4": 1}
DTYPES = ("f16", "bf16", "f32")


def shapes_of_k(qtype):
    """One block, three blocks, and more than a step of every kernel; tails for plain types."""
    block = TYPES[qtype]
    return {1: (7, 33, 517), 32: (32, 96, 1248), 256: (256, 768, 2304)}[block]


def of_type(qtype, *names):
    return [k for k in kernels() if k.format == qtype and k.kernel in names]


def named(name) -> Kernel:
    return next(k for k in kernels() if k.name == name)


def assert_right(problem, lib, simdgroups=2, **options):
    y = problem.run(lib, simdgroups, **options)
    error = problem.error(y)
    where = f"{problem.kernel.name} M={problem.M} N={problem.N} K={problem.K}"
    assert error <= 1, f"{where} batch={problem.batch}: {error} of the allowed error"
    return y


@pytest.mark.parametrize("qtype", TYPES)
def test_every_gemv_equals_the_oracle(qtype):
    lib, rng = library_of(qtype), np.random.default_rng(1)
    place = {0: ALIGNMENT.get(qtype, 2), 1: 4}
    block, blocks, steps = shapes_of_k(qtype)
    for k in of_type(qtype, "gemv"):
        N = k.tile[0] + 1
        assert_right(random_problem(k, k.columns, N, block, rng, with_c=True), lib, offsets=place)
        few = 4 if k.split_k else 1
        problem = random_problem(k, max(1, k.columns - 1), 1, blocks, rng)
        assert_right(problem, lib, few)
        extreme = k.x != "f16"  # whose outputs would overflow
        problem = random_problem(k, 1, 3, steps, rng, batch=2, gather=True, extreme=extreme)
        assert_right(problem, lib, 4, guard="start")


@pytest.mark.parametrize("qtype", TYPES)
def test_every_gemm_equals_the_oracle(qtype):
    lib, rng = library_of(qtype), np.random.default_rng(2)
    block, blocks, _ = shapes_of_k(qtype)
    for k in of_type(qtype, "gemm"):
        M, N = k.tile[1] + 3, 35
        assert_right(random_problem(k, M, N, block, rng, with_c=True), lib)
        if k.x == "f32":
            assert_right(random_problem(k, 1, 1, blocks, rng, batch=2, gather=True), lib)
    for k in of_type(qtype, "gather_gemm"):
        batch = k.tile[1] + 3
        assert_right(random_problem(k, 1, 35, block, rng, batch=batch, gather=True), lib)
        if k.x == "f32":
            assert_right(random_problem(k, 1, 3, blocks, rng, batch=1, gather=True), lib)


@pytest.mark.parametrize("qtype", TYPES)
def test_dequantize_equals_the_oracle(qtype):
    lib, rng = library_of(qtype), np.random.default_rng(3)
    for k in of_type(qtype, "dequantize"):
        for K in shapes_of_k(qtype)[:2]:
            w = random_blocks(qtype, 5, K, rng, extreme=k.x == "f32")
            for rows in (None, np.array([4, 0, 4], "<u4")):
                expected = dequantize64(w, qtype)[rows if rows is not None else slice(None)]
                y = dequantized(lib, k, w, K, rows)
                # The values are gguf-py's in f32, and so is their rounding to narrower types.
                if k.x == "f32":
                    size = np.linalg.norm(expected)
                    assert np.linalg.norm(y - expected) <= TOLERANCE * size, k.name
                else:
                    np.testing.assert_array_equal(y, widen(narrow(expected, k.x), k.x), k.name)


def dequantized(lib, kernel, w, K, rows):
    w = w.copy()
    w.flags.writeable = False
    p = np.zeros((), PARAMS)
    p["M"], p["N"], p["K"] = len(w) if rows is None else len(rows), len(w), K
    p["gather"] = rows is not None
    y = narrow(np.full((p["M"], K), np.nan), kernel.x)
    index = (rows if rows is not None else np.zeros(0, "<u4")).tobytes()
    grid = (-(-K // kernel.tile[0]), int(p["M"]), 1)
    buffers = {0: w, 3: y, 4: p.tobytes(), 6: index}
    lib.run(kernel.name, grid, (kernel.threads, 1, 1), buffers)
    return widen(y, kernel.x)


@pytest.mark.parametrize("qtype", TYPES)
def test_rows_of_a_batch_equal_their_solo_runs_bit_for_bit(qtype):
    lib, rng = library_of(qtype), np.random.default_rng(4)
    gemvs = of_type(qtype, "gemv")
    for k in gemvs:
        if k.columns == 1:
            continue
        solo = next(
            s
            for s in gemvs
            if (s.form, s.x, s.split_k) == (k.form, k.x, k.split_k) and s.columns == 1
        )
        problem = random_problem(k, k.columns, 5, shapes_of_k(qtype)[2], rng)
        y = problem.run(lib, 2)
        x = problem.x
        problem.kernel, problem.M = solo, 1
        for m in range(k.columns):
            problem.x = x[:, m : m + 1]
            alone = problem.run(lib, 2 if k.split_k else 4)
            np.testing.assert_array_equal(y[:, m : m + 1], alone, f"{k.name}, row {m}")


# One plan of each form with the exact numbers of `shown` in metal_kernels_traffic.
SHOWN = [k for k in kernels() if traffic.shown(k)]
FORMS = pytest.mark.parametrize("kernel", SHOWN, ids=lambda k: f"{k.format}-{k.form}")


@FORMS
def test_large_activations_do_not_overflow(kernel):
    lib, rng = library_of(kernel.format), np.random.default_rng(5)
    K = shapes_of_k(kernel.format)[1]
    for dtype, size in (("f16", 65504.0), ("bf16", 1e30), ("f32", 1e30)):
        k = named(kernel.name.replace("_f16_r", f"_{dtype}_r"))
        problem = random_problem(k, 1, 5, K, rng)
        problem.x = narrow(size * rng.choice([-1.0, 1.0], problem.x.shape), dtype)
        problem.alpha = 1e-3  # keeps the f16 result itself in range
        assert_right(problem, lib)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@FORMS
def test_a_bad_block_spoils_only_its_row(kernel, value):
    lib, rng = library_of(kernel.format), np.random.default_rng(6)
    K = shapes_of_k(kernel.format)[1]
    gemm = next(k for k in of_type(kernel.format, "gemm") if k.x == "f32" and k.transpose)
    for k in (kernel, gemm):
        problem = random_problem(k, 1, 5, K, rng)
        good = problem.run(lib)
        problem.w = with_bad_block(problem.w[0], kernel.format, 2, 1, value)[None]
        bad = problem.run(lib)
        assert not np.isfinite(bad[0, 0, 2]), k.name
        np.testing.assert_array_equal(np.delete(good, 2, 2), np.delete(bad, 2, 2), k.name)


def test_the_order_of_lanes_does_not_matter():
    rng = np.random.default_rng(7)
    lib = library_of("iq4_xs")
    split = [k for k in of_type("iq4_xs", "gemv") if k.split_k]
    for k in of_type("iq4_xs", "gemm", "gather_gemm") + split:
        if k.x != "f32":
            continue
        batch = 40 if k.kernel == "gather_gemm" else 1
        M = 40 if k.kernel == "gemm" else 1
        problem = random_problem(k, M, 33, 768, rng, batch=batch, gather=batch > 1)
        forward = problem.run(lib)
        np.testing.assert_array_equal(forward, problem.run(lib, order="reverse"), k.name)


@pytest.mark.parametrize("form", ["shift", "subnormal", "magic", "wide"])
@pytest.mark.parametrize("columns", [1, 4])
def test_q4_k_gemv_loads_every_weight_byte_exactly_once(form, columns):
    kernel = named(f"gguf_gemv_q4_k_{form}_f16_r2_c{columns}")
    t = traffic.measure(library([kernel]), kernel, 8, 4096)
    np.testing.assert_array_equal(t.fetches, 1)  # once for all lanes that need a byte ...
    quants = t.times.reshape(-1, 144)[:, 16:]
    np.testing.assert_array_equal(quants, 1)  # ... and one lane alone needs a quant
    contiguous = 16 if form == "wide" else 8
    assert t.runs[contiguous] * contiguous == quants.size


@FORMS
def test_gemv_touches_all_of_w(kernel):
    t = traffic.measure(library_of(kernel.format), kernel, 5, shapes_of_k(kernel.format)[1])
    assert t.times.min() >= 1


def test_flushed_half_subnormals_are_noticed_and_avoided():
    test = named("gguf_half_test")
    forms = ("subnormal", "magic")
    gemvs = [named(f"gguf_gemv_q5_k_{form}_f16_r4_c1") for form in forms]
    codes = np.arange(1024, dtype="<u4")
    words = codes | codes[::-1] << 16
    right = {}
    for flush in (False, True):
        lib = library([test, *gemvs], flush_half=flush)
        y = np.zeros((1024, 2), "<f4")
        lib.run(test.name, (32, 1, 1), (32, 1, 1), {0: words.tobytes(), 3: y})
        found = np.array_equal(y, np.stack([codes, codes[::-1]], 1))
        assert found is not flush
        for k in gemvs:
            problem = random_problem(k, 1, 8, 1024, np.random.default_rng(8))
            # Normal d and dmin: a device that flushes in conversions would flush those too.
            problem.w.reshape(-1, 176)[:, :4] = np.array([0.25, -1.5], "<f2").view(np.uint8)
            right[k.form, flush] = problem.error(problem.run(lib)) <= 1
    assert right == {
        ("subnormal", False): True,
        ("subnormal", True): False,
        ("magic", False): True,
        ("magic", True): True,
    }


# A kernel, a file, and an edit that every comparison above must notice.
MUTATIONS = [
    ("gguf_gemv_q4_k_shift_f32_r2_c1", "dots/q4_k.h", "q & 0x00f0", "q & 0x0070"),
    ("gguf_gemv_q4_k_shift_f32_r2_c1", "dots/q4_k.h", "q + 32 + j", "q + 28 + j"),
    ("gguf_gemv_q4_k_shift_f32_r2_c1", "dots/q4_k.h", "0xc0c0c0c0", "0x80c0c0c0"),
    ("gguf_gemv_q4_k_shift_f32_r2_c1", "dots/q4_k.h", "a.sum[2 * pair + 1]", "a.sum[2 * pair]"),
    ("gguf_gemv_q4_k_wide_f32_r4_c1", "dots/kquant_codes.h", "q + 16 + j", "q + 12 + j"),
    ("gguf_gemv_q4_k_magic_f32_r4_c1", "dots/codes.h", "half(1024)", "half(1023)"),
    ("gguf_gemv_q5_k_subnormal_f32_r4_c1", "dots/kquant_codes.h", "0x00020002", "0x00010002"),
    ("gguf_gemv_q6_k_subnormal_f32_r4_c1", "dots/signed_codes.h", "0x03000300", "0x01000300"),
    ("gguf_gemv_q8_0_subnormal_f32_r4_c1", "dots/signed_codes.h", "^ 0x80808080", "^ 0x80808000"),
    ("gguf_gemv_q5_1_magic_f32_r4_c1", "dots/nibble_codes.h", "0x00100010)", "0x00100000)"),
    ("gguf_gemv_iq4_xs_table_f32_r2_c1", "formats/tables.h", "16 + 2 * g", "15 + 2 * g"),
    ("gguf_gemv_q3_k_block_f32_r2_c1", "formats/kquants.h", "piece % 4 / 2", "piece % 2"),
    ("gguf_gemv_q3_k_block_f32_r2_c4", "gemv.h", "m * p.K + at", "at"),
    ("gguf_gemv_q3_k_block_f32_r2_c1", "gemv.h", "first_row + r < p.N && ", ""),
    ("gguf_gemv_q3_k_block_f32_r2_c1", "gemv.h", "min(first_row + r, p.N - 1)", "(first_row + r)"),
    ("gguf_gemv_q3_k_block_f32_r2_c1_split", "gemv.h", "s = 1; s", "s = 2; s"),
    ("gguf_gemm_q3_k_f32_t_32x32", "tile.h", "p.N - 1", "p.N - 2"),
    ("gguf_gemm_f16_f32_t_32x32", "tile.h", "k < depth", "k <= depth"),
    ("gguf_gemm_q3_k_f32_n_32x32", "tile.h", "n < p.N && 16", "16"),
    ("gguf_gather_gemm_q3_k_f32_t_32x32", "tile.h", "m >= first", "m > first"),
    ("gguf_gather_gemm_q3_k_f32_t_32x32", "gather.h", "rhs[last] == expert", "last"),
]


@pytest.mark.parametrize(("name", "file", "old", "new"), MUTATIONS)
def test_a_mutation_fails(name, file, old, new):
    kernel = named(name)
    K = shapes_of_k(kernel.format)[2]
    gather = kernel.kernel == "gather_gemm"
    M = 5 if kernel.kernel == "gemm" else kernel.columns
    problem = random_problem(
        kernel, M, 5, K, np.random.default_rng(9), batch=9 if gather else 1, gather=gather
    )
    assert_right(problem, library([kernel], optimize="-O0"))
    edits = []

    def edit(path, text):
        if path != file:
            return text
        edits.append(text.count(old))
        return text.replace(old, new)

    mutant = library([kernel], edit, optimize="-O0")
    assert sum(edits) > 0
    try:
        y = problem.run(mutant)
    except EmulatorError:
        return
    assert problem.error(y) > 1


def test_source_is_metal_and_not_merely_cpp():
    seen = {}
    for k in kernels():
        seen.setdefault((k.kernel, k.format, k.form, k.transpose), k)
    lib = library(list(seen.values()), compile=False)
    lib.check_address_spaces()
    lib.check_forbidden()


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_the_embedded_source_is_the_source(tmp_path):
    out = tmp_path / "source.cpp"
    script = ROOT / "csrc" / "metal" / "embed.cmake"
    arguments = [f"-DROOT={SOURCE}", f"-DOUTPUT={out}", "-P", str(script)]
    subprocess.run(["cmake", *arguments], check=True)
    literals = out.read_text().split('R"metal(')[1:]
    flat = "".join(part.split(')metal"')[0] for part in literals)
    assert '#include "' not in flat

    def tokens(text):
        lines = (line for line in text.splitlines() if not line.startswith("#"))
        return " ".join(lines).split()

    assert tokens(preprocess(flat, [], {})) == tokens(preprocess(SOURCE.read_text(), [METAL], {}))


def test_kernel_names_are_unique_and_every_type_has_every_kernel():
    names = [k.name for k in kernels()]
    assert len(set(names)) == len(names)
    for qtype in TYPES:
        for x in DTYPES:
            mine = of_type(qtype, "gemv", "gemm", "gather_gemm", "dequantize")
            have = {(k.kernel, k.transpose) for k in mine if k.x == x}
            tiles = {(k, t) for k in ("gemm", "gather_gemm") for t in (True, False)}
            assert have == tiles | {("gemv", True), ("dequantize", True)}
            columns = {k.columns for k in of_type(qtype, "gemv") if k.x == x}
            assert columns == {1, 2, 4, 8}


def test_chosen_plans_exist_and_keep_the_order_of_sums_for_small_m():
    problems = [
        (qtype, x, M, N, 512, transpose, pairs, 8, order, gpu, subnormals)
        for qtype in TYPES
        for x in DTYPES
        for gpu, subnormals in (("applegpu_g13g", True), ("applegpu_g17s", False))
        for N in (1, 1000, 20000)
        for transpose in (True, False)
        for pairs, order in ((0, False), (16, False), (256, True))
        for M in (1, 2, 3, 4, 5, 8, 9, 33, 600)
    ]
    names = {k.name for k in kernels()}
    order = {}
    for problem, (name, simdgroups, plan) in zip(problems, choose(problems), strict=True):
        assert name in names, (problem, plan)
        M, transpose, subnormals = problem[2], problem[5], problem[10]
        if not subnormals:
            assert "subnormal" not in plan
            assert "wide" not in plan
        if transpose and M <= 8 and not problem[6]:
            kernel = named(name)
            assert kernel.kernel == "gemv"
            assert kernel.columns >= M
            assert simdgroups in (1, 2, 4)
            key = (*problem[:2], *problem[3:])
            sums = (kernel.form, kernel.split_k, simdgroups if kernel.split_k else 0)
            assert order.setdefault(key, sums) == sums, problem


def test_row_bytes_of_this_file_are_those_of_the_kernels():
    # random_problem gives a buffer of exactly this size, which ends at a guard.
    assert row_bytes("q6_k", 768) == 630
