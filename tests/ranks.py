"""Ranks on this machine, as processes: on the CPU by MLX's ring backend, on GPUs through NCCL.

`run(task, ranks, folder)` starts them; each calls the function `task` below with the group and
the folder and leaves what it returns in `folder/{rank}.npz`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.distributed import shard_inplace, shard_linear

import mlx_gguf as gg
from blocks import TYPES, random_blocks

K, N = 2048, 24  # four ranks share K in whole super-blocks, and N
PROMPT = [3, 7, 11, 5, 2]


def run(
    task: str, ranks: int, folder: Path, backend: str = "ring", timeout: float = 120
) -> list[dict[str, np.ndarray]]:
    """What every rank returned."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "MLX_GGUF_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "ranks", task, str(folder), backend],
            env=environment | place,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in PLACES[backend](ranks, folder)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(errors)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]


def ring_places(ranks: int, folder: Path) -> list[dict[str, str]]:
    """What tells each rank which it is, and where the others are."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    return [{"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} for rank in range(ranks)]


def nccl_places(ranks: int, folder: Path) -> list[dict[str, str]]:
    """The same for ranks with a GPU each."""
    first = {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(free_ports(1)[0])}
    first["MLX_WORLD_SIZE"] = str(ranks)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))).split(",")
    return [
        first | {"MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": gpus[rank]} for rank in range(ranks)
    ]


PLACES = {"ring": ring_places, "nccl": nccl_places}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def one_rank(task: str, folder: Path) -> dict[str, np.ndarray]:
    """The same task by a group of one, in this process."""
    return numpy(TASKS[task](mx.distributed.init(backend="ring", strict=False), folder))


def numpy(arrays: dict[str, mx.array]) -> dict[str, np.ndarray]:
    wide = {
        name: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a for name, a in arrays.items()
    }
    return {name: np.array(a) for name, a in wide.items()}


# Tasks


def layer(rng: np.random.Generator, qtype: str, rows: int, columns: int, bias: bool = False):
    raw = mx.array(random_blocks(qtype, rows, columns, rng, size=(0.01, 0.02)))
    return gg.nn.QuantLinear.from_packed(raw, qtype, mx.arange(rows) / rows if bias else None)


def layers(group, folder):
    """Every type as a pair of layers, rows then columns cut, with the gradient in x."""
    out = {}
    for qtype in TYPES:
        rng = np.random.default_rng(7)
        up, down = layer(rng, qtype, K, 256, True), layer(rng, qtype, N, K, True)
        x = mx.array(rng.standard_normal((3, 256)).astype(np.float32))
        up = shard_linear(up, "all-to-sharded", group=group)
        down = shard_linear(down, "sharded-to-all", group=group)

        def loss(x, up=up, down=down):
            return (down(mx.tanh(up(x))) ** 2).sum()

        out[f"{qtype} y"] = down(mx.tanh(up(x)))
        out[f"{qtype} dx"] = mx.grad(loss)(x)
        half = down(mx.tanh(up(x.astype(mx.bfloat16))))
        assert half.dtype == mx.bfloat16
        out[f"{qtype} half"] = half
    return out


def experts(group, folder):
    """A mixture of experts, cut in place and summed by its owner."""
    rng = np.random.default_rng(3)

    def switch(rows, columns):
        raw = mx.array(random_blocks("q4_k", 6 * rows, columns, rng, size=(0.01, 0.02)))
        return gg.nn.QuantSwitchLinear.from_packed(raw.reshape(6, rows, -1), "q4_k")

    up, down = switch(1024, 256), switch(256, 1024)
    shard_inplace(up, "all-to-sharded", group=group)
    shard_inplace(down, "sharded-to-all", group=group)
    x = mx.array(rng.standard_normal((5, 1, 1, 256)).astype(np.float32))
    chosen = mx.array(rng.integers(0, 6, (5, 2)))
    y = down(mx.tanh(up(x, chosen)), chosen)
    return {"y": mx.distributed.all_sum(y, group=group)}


def models(group, folder):
    """mlx-lm's own models by their own `shard`: logits of a prompt, and tokens after it."""
    from mlx_lm.generate import generate_step

    out = {}
    for i, path in enumerate(sorted(Path(folder).glob("*.gguf"))):
        by_load = i % 2 == 0
        model, _ = gg.load(path, dtype=mx.float32, group=group if by_load else None)
        if not by_load and group.size() > 1:
            model.shard(group)
        # On one stream: ranks that communicate on two at once mix up what they receive.
        out[f"{path.stem} logits"] = model(mx.array([PROMPT]))
        stream = mx.default_stream(mx.default_device())
        steps = generate_step(mx.array(PROMPT), model, max_tokens=4, stream=stream)
        out[f"{path.stem} ids"] = mx.array([int(token) for token, _ in steps])
    return out


def memory(group, folder):
    """What of a file is resident after its two tensors were cut and used, and what was copied."""

    def anonymous():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    f = gg.open(Path(folder) / "big.gguf")
    before = anonymous()
    rows = shard_linear(gg.nn.QuantLinear.from_gguf(f, "rows"), "all-to-sharded", group=group)
    columns = shard_linear(gg.nn.QuantLinear.from_gguf(f, "columns"), "sharded-to-all", group=group)
    mx.eval(columns(rows(mx.ones((1, 4096)))))
    smaps = Path("/proc/self/smaps").read_text()
    mapped = sum(map(int, re.findall(r"big\.gguf\nSize:.*\n(?:\w+:.*\n){2}Rss:\s+(\d+)", smaps)))
    return {"mapped": mx.array(mapped << 10), "copied": mx.array(anonymous() - before)}


TASKS = {task.__name__: task for task in (layers, experts, models, memory)}


def main(task: str, folder: str, backend: str) -> None:
    mx.set_default_device(mx.gpu if backend == "nccl" else mx.cpu)
    group = mx.distributed.init(backend=backend, strict=True)
    out = numpy(TASKS[task](group, folder))
    np.savez(Path(folder) / f"{group.rank()}.npz", **out)


if __name__ == "__main__":
    main(*sys.argv[1:])
