"""Every argument that does not fit is an error that says what was expected and received."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_gguf as gg

X = mx.zeros((2, 256))
W = mx.zeros((4, 144), mx.uint8)
W3 = mx.zeros((3, 4, 144), mx.uint8)

PRODUCTS = {
    "quantized_matmul": lambda x, w, t="q4_k", **o: gg.quantized_matmul(x, w, t, **o),
    "quantized_addmm": lambda x, w, t="q4_k", **o: gg.quantized_addmm(mx.array(0.0), x, w, t, **o),
    "gather_qmm": lambda x, w, t="q4_k", **o: gg.gather_qmm(
        x, w if w.ndim != 2 else w[None], t, **o
    ),
}


def refused(op: str, expected: str, received: str):
    pattern = rf"^\[{op}\] Expected .*{expected}.* Received .*{received}.*\.$"
    return pytest.raises(ValueError, match=pattern)


every_product = pytest.mark.parametrize("op", PRODUCTS)


@every_product
def test_tensor_type(op):
    for qtype, said in (
        ("q9_k", "'q9_k'"),
        ("", "''"),
        ("iq2_xxs", "iq2_xxs, which is known but has no kernels"),
        ("NVFP4", "nvfp4, which is known"),
    ):
        with refused(op, "a tensor type of .*q4_k .*mxfp4", said):
            PRODUCTS[op](X, W, qtype)


@every_product
def test_dtype_of_x(op):
    for dtype in (mx.int32, mx.uint8, mx.bool_, mx.complex64):
        name = str(dtype).removeprefix("mlx.core.")
        with refused(op, "x of dtype float16, bfloat16 or float32", name):
            PRODUCTS[op](X.astype(dtype), W)


@every_product
def test_dtype_of_w(op):
    for dtype in (mx.int8, mx.uint32, mx.float32):
        name = str(dtype).removeprefix("mlx.core.")
        with refused(op, "packed uint8 of type q4_k", f"dtype {name}"):
            PRODUCTS[op](X, W.astype(dtype))
    # A plain type takes its own dtype and bytes, not another's.
    with refused(op, "packed uint8 of type f16", "dtype float32"):
        PRODUCTS[op](X, mx.zeros((4, 256)), "f16")


@every_product
def test_ranks(op):
    with refused(op, "x with at least one axis", "a scalar"):
        PRODUCTS[op](mx.array(1.0), W)
    for w in (W[0], mx.array(1, mx.uint8)):
        with refused(op, r"two axes \[N, row_bytes\]", "shape"):
            PRODUCTS[op](X, w)


@every_product
def test_k_must_be_whole_blocks(op):
    with refused(op, r"whole q4_k blocks of 144 bytes \(256 weights\)", "145"):
        PRODUCTS[op](X, mx.zeros((4, 145), mx.uint8))
    # A K-quant of 640 weights a row would hold two blocks and a half.
    with refused(op, "whole q4_k blocks", "360"):
        PRODUCTS[op](mx.zeros((2, 640)), mx.zeros((4, 360), mx.uint8))


@every_product
def test_inner_sizes(op):
    with refused(op, r"last axis of x to be 256, the inputs of a q4_k .*\(4, 256\)", r"\(2,255\)"):
        PRODUCTS[op](X[:, 1:], W)
    with refused(op, "last axis of x to be 4, the outputs of a q4_k", r"\(2,256\)"):
        PRODUCTS[op](X, W, transpose=False)
    with refused(op, "last axis of x to be 512", r"\(2,256\)"):
        PRODUCTS[op](X, mx.zeros((4, 288), mx.uint8))


@every_product
def test_more_weights_in_a_row_than_an_axis_can_have(op):
    w = mx.broadcast_to(mx.zeros((1, 1), mx.uint8), (1, 18 * 80_000_000))
    with refused(op, r"at most 2\^31 - 1 weights", "2560000000"):
        PRODUCTS[op](X, w, "q4_0")
    with refused("dequantize", r"at most 2\^31 - 1 weights", "2560000000"):
        gg.dequantize(w, "q4_0")


@pytest.mark.parametrize("op", ["quantized_matmul", "quantized_addmm"])
def test_batches_of_weights(op):
    with refused(op, "x with at least two axes", r"\(256\) and w with shape \(3,4,144\)"):
        PRODUCTS[op](X[0], W3)
    with refused(op, "batch axes of x and w", r"\(2,5,256\) and w with shape \(3,4,144\)"):
        PRODUCTS[op](mx.zeros((2, 5, 256)), W3)


def test_addmm_c():
    for c in (mx.zeros((3,)), mx.zeros((3, 4)), mx.zeros((1, 2, 4)), mx.zeros((2, 2))):
        shape = ",".join(map(str, c.shape))
        with refused("quantized_addmm", r"c that broadcasts to \(2,4\)", rf"shape \({shape}\)"):
            gg.quantized_addmm(c, X, W, "q4_k")
    with refused("quantized_addmm", "a floating c", "int32"):
        gg.quantized_addmm(mx.zeros((4,), mx.int32), X, W, "q4_k")


def test_gather_shapes_and_indices():
    with refused("gather_qmm", r"w \[E, N, row_bytes\]", r"\(1,3,4,144\)"):
        gg.gather_qmm(X, W3[None], "q4_k")
    with refused("gather_qmm", r"w \[E, N, row_bytes\]", r"\(4,144\)"):
        gg.gather_qmm(X, W, "q4_k")
    with refused("gather_qmm", r"x \[\.\.\., M, K\]", r"\(256\)"):
        gg.gather_qmm(X[0], W3, "q4_k")
    for name in ("lhs_indices", "rhs_indices"):
        for dtype in (mx.float32, mx.bool_):
            kind = str(dtype).removeprefix("mlx.core.").removesuffix("_")
            with refused("gather_qmm", f"integer {name}", f"dtype {kind}"):
                gg.gather_qmm(X, W3, "q4_k", **{name: mx.zeros((2,), dtype)})
    with refused("gather_qmm", "lhs_indices and rhs_indices that broadcast", r"\(2\) and \(3\)"):
        gg.gather_qmm(X, W3, "q4_k", mx.array([0, 0]), mx.array([0, 1, 2]))


def test_dequantize():
    with refused("dequantize", "a tensor type of", "'q4'"):
        gg.dequantize(W, "q4")
    with refused("dequantize", "dtype float16, bfloat16 or float32", "int32"):
        gg.dequantize(W, "q4_k", mx.int32)
    with refused("dequantize", "at least one axis", "scalar"):
        gg.dequantize(mx.array(1, mx.uint8), "q4_k")
    with refused("dequantize", "whole q4_k blocks", r"\(4,143\)"):
        gg.dequantize(W[:, 1:], "q4_k")
    with refused("dequantize", "packed uint8 of type q4_k", "dtype float32"):
        gg.dequantize(W.astype(mx.float32), "q4_k")


@every_product
def test_wrong_python_types_list_the_signature(op):
    for args in ((X, np.zeros((4, 144), np.uint8), "q4_k"), (X, W, 12), (X, W), (None, W, "q4_k")):
        if op == "quantized_addmm":
            args = (X, *args)
        with pytest.raises(TypeError, match=rf"(?s){op}\(.*mlx\.core\.array"):
            getattr(gg, op)(*args)


def test_errors_leave_nothing_broken():
    with pytest.raises(ValueError, match="quantized_matmul"):
        gg.quantized_matmul(X, W, "q9")
    assert np.array_equal(gg.quantized_matmul(X, W, "q4_k"), np.zeros((2, 4)))
