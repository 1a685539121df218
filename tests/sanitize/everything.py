"""Uses everything of the extension once and ends: what is then still held is a leak."""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlx_gguf as gg
from attacks.gguf_bytes import F32, STRING, entry, gguf, string, tensor
from blocks import TYPES, random_blocks
from mlx_gguf import _ext


def operations() -> None:
    rng = np.random.default_rng(0)
    for qtype in TYPES:
        w = mx.array(random_blocks(qtype, 9, 512, rng))
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            for M in (1, 3, 40):
                x = mx.array(rng.standard_normal((M, 512)).astype(np.float32)).astype(dtype)
                y = gg.quantized_matmul(x, w, qtype)
                z = gg.quantized_matmul(y, w, qtype, transpose=False)
                c = gg.quantized_addmm(y, x, w, qtype, 0.5, 2.0)
                g = gg.gather_qmm(x, w[None], qtype)
                mx.eval(y, z, c, g, gg.dequantize(w, qtype, dtype))
        x = mx.ones((2, 512))
        loss = mx.compile(lambda x, w=w, qtype=qtype: (gg.quantized_matmul(x, w, qtype) ** 2).sum())
        mx.eval(mx.grad(loss)(x), mx.vmap(loss)(x[:, None]))


def files(folder: Path) -> None:
    rows = [tensor("a", [8], F32, 0), tensor("b", [8], F32, 32)]
    data = gguf([entry("k", STRING, string("v"))], rows, bytes(64))
    path = folder / "f.gguf"
    path.write_bytes(data)
    for copy in (False, True):
        f = gg.open(path, copy=copy)
        mx.eval(f["a"] + f["b"])
        assert f.metadata["k"] == "v"
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        try:
            gg.open(path)
        except gg.GGUFError:
            continue
        raise AssertionError(cut)


def errors() -> None:
    w = mx.zeros((4, 144), mx.uint8)
    x, out_of_range = mx.ones((2, 256)), mx.array([7])
    for call in (
        lambda: gg.quantized_matmul(mx.ones((2, 255)), w, "q4_k"),
        lambda: gg.quantized_matmul(x, w, "q9"),
        lambda: gg.gather_qmm(x, w[None], "q4_k", rhs_indices=mx.array(1.5)),
        lambda: mx.eval(gg.gather_qmm(x, w[None], "q4_k", rhs_indices=out_of_range)),
        lambda: gg.dequantize(w, "q4_k", mx.int8),
    ):
        try:
            call()
        except (ValueError, TypeError, RuntimeError):
            continue
        raise AssertionError("no error")


def threads() -> None:
    """Eight at once, each on a stream of its own."""
    w = mx.array(random_blocks("q4_k", 300, 512, np.random.default_rng(0), size=(0.02, 0.03)))
    x = mx.ones((5, 512))
    w3, chosen = mx.stack([w, w]), mx.array([0, 1, 1, 0, 1])
    mx.eval(x, w, w3, chosen)
    expected = np.array(gg.quantized_matmul(x, w, "q4_k"))
    gathered = np.array(gg.gather_qmm(x[:, None], w3, "q4_k", rhs_indices=chosen))
    wrong = []

    def work() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(20):
                y = gg.quantized_matmul(x, w, "q4_k")
                g = gg.gather_qmm(x[:, None], w3, "q4_k", rhs_indices=chosen)
                mx.eval(y, g)
                if not (np.array_equal(y, expected) and np.array_equal(g, gathered)):
                    wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def main(parts: list[str]) -> None:
    _ext.set_leak_warnings(True)
    with tempfile.TemporaryDirectory() as folder:
        for part in parts or ("operations", "files", "errors", "threads"):
            if part == "files":
                files(Path(folder))
            else:
                globals()[part]()
    gc.collect()
    print("everything: done")


if __name__ == "__main__":
    main(sys.argv[1:])
