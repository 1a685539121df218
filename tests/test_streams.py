"""Threads, streams, devices, asynchronous evaluation, forks."""

from __future__ import annotations

import os
import threading

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg
from blocks import random_blocks
from oracle import activations
from subprocesses import run


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    w = mx.array(random_blocks("q4_k", 256, 256, rng, size=(0.02, 0.03)))
    x, _ = activations((4, 256), mx.float32, rng)
    mx.eval(x, w)
    return x, w


def chain(x, w, steps: int = 20):
    """Steps that need contiguous copies of what is not evaluated yet."""
    for i in range(steps):
        x = gg.quantized_matmul(x[::-1], w[::-1], "q4_k", transpose=i % 2 == 0)
        x = x[:, ::-1] + x
    return x


def test_async_chains_equal_step_by_step_evaluation(problem):
    x, w = problem
    expected = x
    for i in range(20):
        expected = gg.quantized_matmul(
            mx.array(np.array(expected)[::-1].copy()),
            mx.array(np.array(w)[::-1].copy()),
            "q4_k",
            transpose=i % 2 == 0,
        )
        expected = mx.array(np.array(expected)[:, ::-1].copy()) + expected
        mx.eval(expected)
    results = [chain(x, w) for _ in range(10)]
    mx.async_eval(*results)
    del x
    for y in results:
        assert mx.array_equal(y, expected)


def test_inputs_may_go_before_their_results_are_read(problem):
    x, w = problem
    expected = np.array(chain(x, w))
    results = []
    for _ in range(20):
        copy, weights = x + 0, w + 0
        results.append(chain(copy, weights))
        del copy, weights
        mx.async_eval(results[-1])
    assert all(np.array_equal(y, expected) for y in results)


def test_results_of_one_stream_feed_another(problem):
    x, w = problem
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    expected = chain(x, w, 12)
    y = x
    for i in range(12):
        s = streams[i % 3]
        y = gg.quantized_matmul(y[::-1], w[::-1], "q4_k", transpose=i % 2 == 0, stream=s)
        y = mx.add(y[:, ::-1], y, stream=s)
    assert mx.array_equal(y, expected)


def test_the_operations_stream_decides_its_device(problem):
    x, w = problem
    y = gg.quantized_matmul(x, w, "q4_k", stream=mx.cpu)
    with mx.stream(mx.new_stream(mx.cpu)):
        assert mx.array_equal(gg.quantized_matmul(x, w, "q4_k"), y)
    for op in (
        lambda s: gg.quantized_matmul(x, w, "q4_k", stream=s),
        lambda s: gg.quantized_addmm(mx.array(1.0), x, w, "q4_k", stream=s),
        lambda s: gg.gather_qmm(x, w[None], "q4_k", stream=s),
        lambda s: gg.dequantize(w, "q4_k", stream=s),
    ):
        mx.eval(op(mx.cpu), op(mx.default_stream(mx.cpu)))


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error(problem):
    x, w = problem
    with pytest.raises((ValueError, RuntimeError), match="gpu"):
        mx.eval(gg.quantized_matmul(x, w, "q4_k", stream=mx.gpu))


def in_threads(n: int, body) -> None:
    errors = []

    def guarded(i):
        try:
            body(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


def test_threads_evaluate_at_once(problem):
    x, w = problem
    expected = np.array(chain(x, w))
    w3 = mx.stack([w, w])
    idx = mx.array([0, 1, 1])
    gathered = np.array(gg.gather_qmm(x, w3, "q4_k", rhs_indices=idx))
    mx.eval(w3, idx)

    def body(i):
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(5):
                assert np.array_equal(chain(x, w), expected)
                y = gg.gather_qmm(x, w3, "q4_k", rhs_indices=idx)
                assert np.array_equal(y, gathered)

    in_threads(6, body)


def test_a_graph_made_on_one_thread_is_evaluated_on_another(problem):
    x, w = problem
    expected = np.array(chain(x, w))
    with mx.stream(mx.new_thread_unsafe_stream(mx.cpu)):
        graphs = [chain(x, w) for _ in range(2)]
    out = []
    # One thread at a time: that is what such a stream asks for.
    for y in graphs:
        in_threads(1, lambda _, y=y: out.append(np.array(y)))
    assert len(out) == 2
    assert all(np.array_equal(y, expected) for y in out)


def test_an_index_error_on_one_thread_leaves_others_alone(problem):
    x, w = problem
    expected = np.array(chain(x, w))

    def body(i):
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(4):
                if i % 2:
                    y = gg.gather_qmm(x, w[None], "q4_k", rhs_indices=mx.array([0, 7]))
                    with pytest.raises(RuntimeError, match="Received 7"):
                        mx.eval(y)
                else:
                    assert np.array_equal(chain(x, w), expected)

    in_threads(4, body)


MAKE = """
import os, sys, threading
import mlx.core as mx, numpy as np
from blocks import random_blocks
rng = np.random.default_rng(0)
raw = random_blocks("q4_k", 256, 512, rng)
def product():
    import mlx_gguf as gg
    x = mx.array(np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32))
    return float(np.array(gg.quantized_matmul(x, mx.array(raw), "q4_k")).sum())
"""


def test_import_makes_no_stream_and_no_thread():
    # The first stream that this process makes is the one it is without the package.
    code = "import mlx.core as mx; print(len(os.listdir(tasks)), mx.new_stream(mx.cpu))"
    head = "import os, sys; tasks = '/proc/self/task' if sys.platform == 'linux' else '.'\n"
    plain = run(head + "import numpy, gguf, mlx.nn, mlx_lm\n" + code)
    ours = run(head + "import numpy, gguf, mlx.nn, mlx_lm\nimport mlx_gguf\n" + code)
    assert ours == plain


def test_import_on_one_thread_and_use_on_another():
    code = MAKE + (
        "t = threading.Thread(target=lambda: __import__('mlx_gguf')); t.start(); t.join()\n"
        "expected, out = product(), []\n"
        "def work():\n"
        "    with mx.stream(mx.new_stream(mx.cpu)): out.append(product())\n"
        "t = threading.Thread(target=work); t.start(); t.join()\n"
        "assert out == [expected], out\n"
    )
    run(code)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_pool_of_its_own():
    # The parent's pool exists; MLX's own threads, which no child can use, do not yet.
    code = MAKE + (
        "from mlx_gguf import _ext\n"
        "assert _ext.cpu_threads() == 3\n"
        "sys.stdout.flush()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    import signal; signal.alarm(60)\n"
        "    os._exit(0 if product() == product() and _ext.cpu_threads() == 3 else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "product()\n"
    )
    run(code, MLX_GGUF_NUM_THREADS="3")


def test_a_process_ends_while_work_is_under_way():
    code = MAKE + (
        "import mlx_gguf as gg\n"
        "y = mx.ones((64, 512))\n"
        "w = mx.array(raw)\n"
        "for i in range(50):\n"
        "    y = gg.quantized_matmul(gg.quantized_matmul(y, w, 'q4_k'), w, 'q4_k', False) * 1e-3\n"
        "mx.async_eval(y)\n"
    )
    run(code)
