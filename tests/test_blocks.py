"""The oracle of the other tests, checked against the formulas of the formats written out slowly."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from blocks import _HALVES, TYPES, dequantize64, random_blocks, row_bytes, with_bad_block
from reference import models

KV = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def half(b, offset):
    return float(np.frombuffer(b[offset : offset + 2], "<f2")[0])


def int8(byte):
    return byte - 256 if byte > 127 else byte


def nibble32(qs, e):
    return qs[e % 16] >> (0 if e < 16 else 4) & 15


def bit5(b, offset, e):
    return (int.from_bytes(b[offset : offset + 4], "little") >> e & 1) << 4


def scale_min(s, j):
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def f32(b, e):
    return float(np.frombuffer(b, "<f4")[0])


def f16(b, e):
    return half(b, 0)


def bf16(b, e):
    return float(np.frombuffer(b"\0\0" + b, "<f4")[0])


def q4_0(b, e):
    return half(b, 0) * (nibble32(b[2:], e) - 8)


def q4_1(b, e):
    return half(b, 0) * nibble32(b[4:], e) + half(b, 2)


def q5_0(b, e):
    return half(b, 0) * ((nibble32(b[6:], e) | bit5(b, 2, e)) - 16)


def q5_1(b, e):
    return half(b, 0) * (nibble32(b[8:], e) | bit5(b, 4, e)) + half(b, 2)


def q8_0(b, e):
    return half(b, 0) * int8(b[2 + e])


def q2_k(b, e):
    scale = b[e // 16]
    q = b[16 + 32 * (e // 128) + e % 32] >> 2 * (e % 128 // 32) & 3
    return half(b, 80) * (scale & 15) * q - half(b, 82) * (scale >> 4)


def q3_k(b, e):
    j = e // 16
    low = b[96 + j % 8] >> (0 if j < 8 else 4) & 15
    scale = low | (b[104 + j % 4] >> 2 * (j // 4) & 3) << 4
    q = b[32 + 32 * (e // 128) + e % 32] >> 2 * (e % 128 // 32) & 3
    q -= 0 if b[e % 32] >> e // 32 & 1 else 4
    return half(b, 108) * (scale - 32) * q


def q4_k(b, e):
    c, h, i = e // 64, e % 64 // 32, e % 32
    scale, low = scale_min(b[4:16], 2 * c + h)
    q = b[16 + 32 * c + i] >> 4 * h & 15
    return half(b, 0) * scale * q - half(b, 2) * low


def q5_k(b, e):
    c, h, i = e // 64, e % 64 // 32, e % 32
    j = 2 * c + h
    scale, low = scale_min(b[4:16], j)
    q = (b[48 + 32 * c + i] >> 4 * h & 15) + ((b[16 + i] >> j & 1) << 4)
    return half(b, 0) * scale * q - half(b, 2) * low


def q6_k(b, e):
    n, k, i = e // 128, e % 128 // 32, e % 32
    low = b[64 * n + 32 * (k & 1) + i] >> (4 if k >= 2 else 0) & 15
    q = low | (b[128 + 32 * n + i] >> 2 * k & 3) << 4
    return half(b, 208) * int8(b[192 + e // 16]) * (q - 32)


def iq4_nl(b, e):
    return half(b, 0) * KV[nibble32(b[2:], e)]


def iq4_xs(b, e):
    ib, jj = e // 32, e % 32
    high = int.from_bytes(b[2:4], "little") >> 2 * ib & 3
    scale = (b[4 + ib // 2] >> 4 * (ib & 1) & 15) | high << 4
    q = b[8 + 16 * ib + jj % 16] >> (4 if jj >= 16 else 0) & 15
    return half(b, 0) * (scale - 32) * KV[q]


def mxfp4(b, e):
    q = nibble32(b[1:], e)
    return (-1.0 if q & 8 else 1.0) * E2M1[q & 7] * 2.0 ** (b[0] - 127)


def by_formula(packed, qtype, K):
    weight, size = globals()[qtype], TYPES[qtype]
    nbytes = row_bytes(qtype, size)
    rows = [bytes(row) for row in packed]
    cut = [[r[i : i + nbytes] for i in range(0, len(r), nbytes)] for r in rows]
    return np.array([[weight(r[e // size], e % size) for e in range(K)] for r in cut])


def every_type(test):
    return pytest.mark.parametrize("qtype", TYPES)(test)


@every_type
@pytest.mark.parametrize("extreme", [False, True])
def test_gguf_py_agrees_with_the_written_formula(qtype, extreme):
    rows, K = 12, max(TYPES[qtype] * 2, 64)
    packed = random_blocks(qtype, rows, K, np.random.default_rng(1), extreme=extreme)
    expected = by_formula(packed, qtype, K)
    actual = dequantize64(packed, qtype)
    # gguf-py rounds d * scale * q and the min's product to float32, then their difference: with
    # cancellation the error is relative to the block's largest weight.
    size = TYPES[qtype]
    largest = np.abs(expected).reshape(rows, K // size, size).max(-1, keepdims=True)
    error = np.abs(actual - expected).reshape(rows, K // size, size)
    assert np.all(error <= 4e-7 * largest)
    assert np.all(np.isfinite(actual))


@every_type
def test_random_weights_have_a_moderate_size_of_both_signs(qtype):
    K = 8 * max(TYPES[qtype], 32)
    weights = dequantize64(random_blocks(qtype, 64, K, np.random.default_rng(2)), qtype)
    size = np.sqrt(np.mean(weights.reshape(64, 8, -1) ** 2, axis=-1))
    assert 0.005 < size.min() < size.max() < 3
    assert size.max() > 2 * size.min()
    assert 0.2 < np.mean(weights < 0) < 0.8


@pytest.mark.parametrize("qtype", _HALVES)
def test_every_free_bit_is_used_and_scales_take_both_signs(qtype):
    nbytes = row_bytes(qtype, TYPES[qtype])
    packed = random_blocks(qtype, 512, TYPES[qtype], np.random.default_rng(3))
    free = np.ones(nbytes, bool)
    for offset in _HALVES[qtype]:
        free[offset : offset + 2] = False
        sign = packed[:, offset + 1] >> 7
        assert 0 < sign.sum() < 512
    assert np.all(np.bitwise_or.reduce(packed[:, free], axis=0) == 0xFF)
    assert np.all(np.bitwise_and.reduce(packed[:, free], axis=0) == 0)


@pytest.mark.parametrize("qtype", _HALVES)
def test_extreme_blocks_reach_the_ends_of_fp16(qtype):
    packed = random_blocks(qtype, 512, TYPES[qtype], np.random.default_rng(4), extreme=True)
    for offset in _HALVES[qtype]:
        d = np.ascontiguousarray(packed[:, offset : offset + 2]).view("<f2").ravel()
        bits = set(d.view(np.uint16).tolist())
        assert {0x7BFF, 0xFBFF, 0x0001, 0x8001, 0x0000, 0x8000} <= bits


def test_extreme_mxfp4_exponents_all_occur_and_rows_can_be_summed():
    packed = random_blocks("mxfp4", 64, 256, np.random.default_rng(5), extreme=True)
    assert {0, 1, 2, 254} <= set(packed.reshape(-1, 17)[:, 0].tolist())
    assert np.all(np.abs(dequantize64(packed, "mxfp4")).sum(axis=1) < 1e38)


@every_type
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_block_spoils_only_itself(qtype, value):
    size = TYPES[qtype]
    packed = random_blocks(qtype, 3, 4 * size, np.random.default_rng(6))
    bad = dequantize64(with_bad_block(packed, qtype, 1, 2, value), qtype)
    spoilt = np.zeros(bad.shape, bool)
    spoilt[1, 2 * size : 3 * size] = True
    assert not np.any(np.isfinite(bad[spoilt]))
    assert np.array_equal(bad[~spoilt], dequantize64(packed, qtype)[~spoilt])


def test_a_row_that_is_not_whole_blocks_is_refused():
    with pytest.raises(ValueError, match=r"Expected K divisible by 256 for q4_k. Received 640"):
        random_blocks("q4_k", 1, 640, np.random.default_rng(0))


@every_type
def test_no_rows_give_an_empty_matrix(qtype):
    packed = random_blocks(qtype, 0, 256, np.random.default_rng(0), extreme=True)
    assert dequantize64(packed, qtype).shape == (0, 256)


@pytest.mark.parametrize("name", models.MODELS)
def test_reference_weights_are_those_of_the_committed_logits(name):
    with np.load(Path(__file__).parent / "reference" / "logits.npz") as logits:
        assert models.fingerprint(name) == logits[f"{name}/fingerprint"], (
            "numpy draws other weights than those of logits.npz: run `make reference`"
        )


@pytest.mark.parametrize("name", models.MODELS)
def test_a_written_reference_model_holds_its_tensors(name, tmp_path):
    path = tmp_path / "model.gguf"
    models.write_model(name, path)
    reader = gguf.GGUFReader(path)
    written = {t.name: (t.tensor_type.name.lower(), t.data) for t in reader.tensors}
    expected = models.tensors(name)
    assert written.keys() == expected.keys()
    for key, (qtype, packed) in expected.items():
        assert written[key][0] == qtype
        assert np.array_equal(np.ascontiguousarray(written[key][1]).view(np.uint8), packed)
