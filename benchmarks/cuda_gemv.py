"""Products of few rows on a CUDA device against the read floor, float64 and MLX's 4-bit.

    python benchmarks/cuda_gemv.py --json results.json

Kernels run by themselves as CUDA graph replays over weights that rotate through 1 GiB, so that
they are cold; the read floor is the best of several launches of a kernel that reads the same
bytes and does nothing else, in the same run. The launch that is timed is checked. A row of x is
also timed as steps launch kernels: each starts beside the one before it and waits by itself. MLX's
own 4-bit product and ours are then timed through MLX, as mx.eval of many products: of one input,
and of the product before.
"""

from __future__ import annotations

import argparse
import ctypes as C
import datetime
import json
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlx_gguf as gg
from cuda_driver import ROOT, Device, Params, compile, flatten
from mlx_gguf import _ext

sys.path.insert(0, str(ROOT / "tests"))
from blocks import dequantize64, random_blocks

SHAPES = [
    (4096, 4096),
    (12288, 4096),
    (4096, 12288),
    (17408, 5120),
    (5120, 17408),
    (34816, 5120),
    (151936, 4096),
]
TYPES = ["q4_k", "q5_k", "q6_k", "q8_0", "iq4_xs"]
ROWS = (1, 2, 4, 8)  # of x
POOL = 1 << 30
PRODUCTS = 256  # of an evaluation
IN_TURN = [(4096, 4096), (12288, 4096), (17408, 5120)]
FLOORS = [(132 * 2, 1024), (132 * 4, 512), (132 * 6, 512), (132 * 8, 256), (132 * 16, 256)]


def driver_version(device: Device) -> int:
    version = C.c_int()
    device.call("cuDriverGetVersion", C.byref(version))
    return version.value


def floor_seconds(device: Device, floor, pool: int, nbytes: int) -> float:
    step = -(-nbytes // 256) * 256
    count = max(1, min(64, POOL // step))

    def timed(grid: int, threads: int) -> float:
        def launch(i: int) -> None:
            at = pool + i % count * step
            device.launch(
                floor, (grid, 1, 1), (threads, 1, 1), 0, 1, [at, nbytes // 16, pool + POOL]
            )

        return device.seconds(launch, max(32, count))

    return min(timed(*shape) for shape in FLOORS)


def gemv(
    device: Device,
    kernels: dict,
    qtype: str,
    M: int,
    N: int,
    K: int,
    unrounded: bool = False,
    early: bool = False,
):
    """A function of the addresses of w, x and y that launches the product, and its plan.

    unrounded: y is f32, as it is before the one rounding at the end. early: as steps launch it.
    """
    info = _ext.cuda_launch(qtype, "float16", M, N, K)
    key = info["function"], unrounded
    if key not in kernels:
        source = flatten(ROOT / "cuda" / "kernels.cu")
        if unrounded:
            end = "y[i] = narrow<T>(value);"
            assert source.count(end) == 1
            source = source.replace(end, "((float*)y)[i] = value;")
        code, (name,) = compile(source, [info["function"]])
        kernels[key] = device.function(code, name)
    params = Params(M=M, N=N, K=K, alpha=1, beta=1, columns=M, inverse=-(-(1 << 31) // M))
    for name in ("held", "rows", "split", "ranks", "stages"):
        setattr(params, name, info[name])
    params.x_step, params.y_step, params.early = M * K, M * N, early
    row_bytes = K // gg.find_format(qtype).block_size * gg.find_format(qtype).block_bytes
    maps: dict = {}

    def launch(w: int, x: int, y: int) -> None:
        if w not in maps:
            maps[w] = device.tensor_map(w, row_bytes, N, info["interleave"], info["box_bytes"])
        device.launch(
            kernels[key],
            info["grid"],
            info["block"],
            info["shared_bytes"],
            info["cluster"],
            [maps[w], x, 0, y, params, 0, 0],
            early,
        )

    return launch, info["plan"]


def error_before_rounding(device, kernels, pool, qtype, K, rng) -> float:
    packed = random_blocks(qtype, 520, K, rng)
    x64 = rng.standard_normal((8, K)).astype(np.float16)
    ref = x64.astype(np.float64) @ dequantize64(packed, qtype).T
    x, y = pool + POOL + 4096, pool + POOL + (1 << 20)
    device.upload(pool, packed)
    device.upload(x, x64)
    errors = []
    for M in ROWS:
        launch, _ = gemv(device, kernels, qtype, M, 520, K, unrounded=True)
        launch(pool, x, y)
        device.call("cuStreamSynchronize", device.stream)
        got = device.download(y, (M, 520), np.float32)
        errors.append(np.linalg.norm(got - ref[:M]) / np.linalg.norm(ref[:M]))
    return max(errors)


def measure(device, kernels, floor, pool, qtype, N, K, rng) -> dict:
    packed = random_blocks(qtype, 512, K, rng)
    nbytes = packed.nbytes // 512 * N
    step = -(-nbytes // 256) * 256
    count = max(1, min(64, POOL // step))
    device.upload(pool, packed)
    device.repeat(pool, packed.nbytes, POOL)
    row = {"qtype": qtype, "N": N, "K": K, "bytes": nbytes}
    before = floor_seconds(device, floor, pool, nbytes)
    x64 = rng.standard_normal((8, K)).astype(np.float16)
    x, y = pool + POOL + 4096, pool + POOL + (1 << 20)
    results: dict = {}
    for M, early in [*((M, False) for M in ROWS), (1, True)]:
        launch, plan = gemv(device, kernels, qtype, M, N, K, early=early)
        device.upload(x, x64[:M])

        def go(i: int, launch=launch) -> None:
            launch(pool + i % count * step, x, y)

        seconds = device.seconds(go, max(32, count))
        if early:
            got = device.download(y, (M, N), np.float16).astype(np.float64)
            row["us_m1_early"] = 1e6 * seconds
            row["rows_equal"] = bool((got == results[1]).all())
            continue
        # Rows of the last launch are 512 at a time those of `packed`, from where it starts.
        at = (max(32, count) - 1) % count * step
        got = device.download(y, (M, N), np.float16).astype(np.float64)
        row_bytes = packed.nbytes // 512
        if at % row_bytes == 0:
            W = dequantize64(np.roll(packed, -(at // row_bytes), 0), qtype)
            take = min(N, 512)
            ref = x64[:M].astype(np.float64) @ W[:take].T
            error = np.linalg.norm(got[:, :take] - ref) / np.linalg.norm(ref)
            row[f"error_m{M}"] = error
        row |= {f"us_m{M}": 1e6 * seconds, f"plan_m{M}": plan}
        row[f"gbs_m{M}"] = nbytes / seconds / 1e9
        results[M] = got
    row["floor_us"] = 1e6 * min(before, floor_seconds(device, floor, pool, nbytes))
    for M in ROWS:
        row[f"ratio_m{M}"] = row[f"us_m{M}"] / row["floor_us"]
    row["rows_equal"] &= all(bool((results[M] == results[8][:M]).all()) for M in ROWS)
    row["error_before_rounding"] = error_before_rounding(device, kernels, pool, qtype, K, rng)
    row["m8_over_m1"] = row["us_m8"] / row["us_m1"]
    return row


def through_mlx(N: int, K: int, rng) -> dict:
    """Ours (q4_k) and MLX's affine 4-bit, groups of 32, as mx.eval of many products.

    They are so many that what an evaluation costs to start is little of it; weights take turns.
    """
    count = max(8, min(64, (1 << 30) // (N * K * 9 // 16)))
    x = mx.array(rng.standard_normal((1, K)).astype(np.float16))
    packed = random_blocks("q4_k", 256, K, rng)
    ours = [mx.array(np.resize(packed, (N, packed.shape[1]))) for _ in range(count)]
    dense = mx.random.normal((N, K)).astype(mx.float16)
    theirs = [[a + 0 for a in mx.quantize(dense, group_size=32, bits=4)] for _ in range(count)]
    mx.eval(ours, theirs)
    # A copy lies in the device's own memory.
    ours = [w + mx.array(0, mx.uint8) for w in ours]
    mx.eval(ours)

    def timed(make) -> float:
        times = []
        for _ in range(12):
            outputs = [make(i % count) for i in range(PRODUCTS)]
            mx.synchronize()
            start = time.perf_counter()
            mx.eval(outputs)
            times.append((time.perf_counter() - start) / PRODUCTS)
        return 1e6 * float(np.median(times[2:]))

    our = timed(lambda i: gg.quantized_matmul(x, ours[i], "q4_k"))
    their = timed(
        lambda i: mx.quantized_matmul(x, *theirs[i], transpose=True, group_size=32, bits=4)
    )
    return {"N": N, "K": K, "ours_us": our, "mlx4_us": their, "faster": their / our}


def in_turn(N: int, K: int, rng) -> dict:
    """The same with products of the one before: of [N, K] and, unless it is square, [K, N]."""
    shapes = [(N, K)] if N == K else [(N, K), (K, N)]
    count = max(2, min(32, (1 << 30) // (N * K * 9 // 16) // len(shapes)))
    ours, theirs = [], []
    for rows, width in shapes * count:
        size = (0.7 * width**-0.5, 1.4 * width**-0.5)
        packed = random_blocks("q4_k", 256, width, rng, size=size)
        ours.append(mx.array(np.resize(packed, (rows, packed.shape[1]))) + mx.array(0, mx.uint8))
        dense = (mx.random.normal((rows, width)) * width**-0.5).astype(mx.float16)
        theirs.append([a + 0 for a in mx.quantize(dense, group_size=32, bits=4)])
        mx.eval(ours[-1], theirs[-1])

    def timed(product, weights) -> float:
        times = []
        for _ in range(12):
            x = mx.array(rng.standard_normal((1, K)).astype(np.float16))
            for i in range(PRODUCTS // 2):
                x = product(x, weights[i % len(weights)])
            mx.synchronize()
            start = time.perf_counter()
            mx.eval(x)
            times.append((time.perf_counter() - start) / (PRODUCTS // 2))
        return 1e6 * float(np.median(times[2:]))

    our = timed(lambda x, w: gg.quantized_matmul(x, w, "q4_k"), ours)
    their = timed(
        lambda x, w: mx.quantized_matmul(x, *w, transpose=True, group_size=32, bits=4), theirs
    )
    return {"shapes": shapes, "ours_us": our, "mlx4_us": their, "faster": their / our}


def prefill(N: int, K: int, M: int, rng) -> dict:
    """Many rows in bfloat16 through MLX: ours (q4_k) and MLX's dense product."""
    x = mx.random.normal((M, K)).astype(mx.bfloat16)
    packed = mx.array(np.resize(random_blocks("q4_k", 256, K, rng), (N, K // 256 * 144)))
    dense = gg.dequantize(packed, "q4_k", mx.bfloat16)
    mx.eval(x, packed, dense)

    def timed(make) -> float:
        times = []
        for _ in range(12):
            start = time.perf_counter()
            mx.eval(make())
            times.append(time.perf_counter() - start)
        return float(np.median(times[2:]))

    our = timed(lambda: gg.quantized_matmul(x, packed, "q4_k"))
    their = timed(lambda: x @ dense.T)
    return {
        "M": M,
        "N": N,
        "K": K,
        "ours_ms": 1e3 * our,
        "dense_ms": 1e3 * their,
        "ours_tflops": 2 * M * N * K / our / 1e12,
        "share": their / our,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--no-mlx", action="store_true")
    args = parser.parse_args()
    device, rng = Device(), np.random.default_rng(0)
    code, _ = compile((ROOT / "benchmarks" / "cuda_read_floor.cu").read_text(), [])
    floor = device.function(code, b"read_floor")
    pool = device.malloc(POOL + (1 << 24))
    kernels: dict = {}
    info = mx.device_info(mx.gpu)
    out = {
        "date": datetime.date.today().isoformat(),
        "device": str(info.get("device_name")),
        "driver": driver_version(device),
        "mlx": mx.__version__,
        "kernels": [],
        "through_mlx": [],
        "in_turn": [],
    }
    print(
        f"{'type':8}{'N':>8}{'K':>7}{'floor us':>10}{'M=1':>8}{'early':>8}{'M=8':>8}"
        f"{'M8/M1':>7}  error"
    )
    for qtype in args.types.split(","):
        for N, K in SHAPES:
            row = measure(device, kernels, floor, pool, qtype, N, K, rng)
            out["kernels"].append(row)
            print(
                f"{qtype:8}{N:8}{K:7}{row['floor_us']:10.2f}{row['ratio_m1']:8.2f}"
                f"{row['us_m1_early'] / row['floor_us']:8.2f}{row['ratio_m8']:8.2f}"
                f"{row['m8_over_m1']:7.2f}  {row['error_before_rounding']:.1e}"
                + ("" if row["rows_equal"] else "  ROWS DIFFER"),
                flush=True,
            )
    if not args.no_mlx:
        for N, K in SHAPES[:-1]:
            row = through_mlx(N, K, rng)
            out["through_mlx"].append(row)
            print(
                f"through MLX {N}x{K}: ours {row['ours_us']:.1f} us, MLX 4-bit "
                f"{row['mlx4_us']:.1f} us, x{row['faster']:.2f}",
                flush=True,
            )
        for N, K in IN_TURN:
            row = in_turn(N, K, rng)
            out["in_turn"].append(row)
            print(
                f"in turn, {N}x{K} and back: ours {row['ours_us']:.1f} us, MLX 4-bit "
                f"{row['mlx4_us']:.1f} us, x{row['faster']:.2f}",
                flush=True,
            )
        row = prefill(17408, 5120, 2048, rng)
        out["prefill"] = row
        print(
            f"prefill of {row['M']}, 17408x5120 bf16: ours {row['ours_ms']:.2f} ms "
            f"({row['ours_tflops']:.0f} TFLOP/s), dense {row['dense_ms']:.2f} ms, "
            f"{100 * row['share']:.0f} % of it"
        )
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
