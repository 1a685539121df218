"""The emulator runs Metal kernels rightly and refuses what Metal refuses."""

from __future__ import annotations

from fractions import Fraction

import gguf
import numpy as np
import pytest

from metal_emulator import CompileError, EmulatorError, Library

HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"

KERNELS = (
    HEAD
    + r"""
// Q4_K, one row per simdgroup, one group of 32 weights per lane pair.
template <typename T>
[[max_total_threads_per_threadgroup(64)]]
kernel void q4k_gemv(device T* y [[buffer(0)]], const device T* x [[buffer(1)]],
                     const device uchar* w [[buffer(2)]], constant uint2& shape [[buffer(3)]],
                     uint3 group [[threadgroup_position_in_grid]],
                     ushort lane [[thread_index_in_simdgroup]],
                     ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint n = shape.x, blocks = shape.y / 256, row = group.x * 2 + simdgroup;
  if (row >= n) return;
  constexpr ushort lows[4] = {0x000f, 0x0f00, 0x00f0, 0xf000};
  const ushort part = lane % 4, pair = lane / 4 % 4, half_of = lane / 16;
  float sum = 0;
  for (uint b = half_of; b < blocks; b += 2) {
    const device uchar* block = w + (row * blocks + b) * 144;
    const device uchar* s = block + 4;
    uchar2 scale, least;
    for (ushort h = 0; h < 2; ++h) {
      const ushort j = 2 * pair + h;
      scale[h] = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
      least[h] = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
    const device ushort* q = reinterpret_cast<const device ushort*>(block + 16) + 16 * pair;
    const device T* xs = x + b * 256 + 64 * pair;
    float4 dots = 0.0f;
    float2 sums = 0.0f;
    for (ushort i = 0; i < 4; ++i) {
      const ushort at = 4 * part + i;
      const ushort word = q[at];
      for (ushort k = 0; k < 4; ++k) {
        const float v = float(xs[2 * at + k % 2 + 32 * (k / 2)]);
        dots[k] = fma(v, float(word & lows[k]), dots[k]);
        sums[k / 2] += v;
      }
    }
    dots *= float4(1.0, 1.0 / 256, 1.0 / 16, 1.0 / 4096);
    const half2 d = as_type<half2>(*reinterpret_cast<const device uint*>(block));
    sum += float(d.x) * dot(dots.xz + dots.yw, float2(scale));
    sum -= float(d.y) * dot(sums, float2(least));
  }
  sum = simd_sum(sum);
  if (lane == 0) y[row] = T(sum);
}
#define instantiate_q4k(name, type) \
  template [[host_name(name)]] [[kernel]] decltype(q4k_gemv<type>) q4k_gemv<type>;
instantiate_q4k("q4k_float", float)
instantiate_q4k("q4k_half", half)
instantiate_q4k("q4k_bfloat", bfloat)

kernel void copy_shifted(device uchar* to [[buffer(0)]], const device uchar* from [[buffer(1)]],
                         constant int& shift [[buffer(2)]], constant int& count [[buffer(3)]],
                         uint i [[thread_position_in_grid]]) {
  if (int(i) < count) to[i] = from[int(i) + shift];
}
kernel void store_shifted(device uchar* to [[buffer(0)]], constant int& shift [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  to[int(i) + shift] = uchar(i);
}
kernel void wide_load(device uint* to [[buffer(0)]], const device uchar* from [[buffer(1)]],
                      constant uint& at [[buffer(2)]]) {
  to[0] = *reinterpret_cast<const device uint*>(from + at);
}

kernel void uneven_barrier(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = i;
  if (i < 40) threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = shared[63 - i];
}
kernel void uneven_sum(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 5) return;
  y[i] = simd_sum(1.0f);
}
kernel void two_sums(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 16) {
    y[i] = simd_sum(1.0f);
  } else {
    y[i] = simd_sum(2.0f);
  }
}

kernel void reverse_in_threadgroup(device float* y [[buffer(0)]],
                                   const device float* x [[buffer(1)]],
                                   threadgroup float* extra [[threadgroup(0)]],
                                   constant bool& fill [[buffer(2)]],
                                   uint i [[thread_index_in_threadgroup]],
                                   uint n [[threads_per_threadgroup]]) {
  threadgroup float a[96], b[2][48];
  if (fill) a[i] = x[i];
  extra[i] = x[i];
  b[i / 48][i % 48] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[n - 1 - i];
  y[n + i] = extra[n - 1 - i];
  y[2 * n + i] = b[0][0] + b[(n - 1 - i) / 48][(n - 1 - i) % 48];
}
kernel void missing_barrier(device float* y [[buffer(0)]],
                            uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  a[i] = i;
  y[i] = a[63 - i];
}
kernel void beyond_threadgroup(device float* y [[buffer(0)]], constant uint& at [[buffer(1)]]) {
  threadgroup float a[7];
  threadgroup float* p = a;
  p[at] = 1;
  y[0] = p[at];
}
float last_of(thread const float* v, uint n) { return v[n]; }
kernel void beyond_local(device float* y [[buffer(0)]], constant uint& at [[buffer(1)]]) {
  float v[6];
  for (uint i = 0; i < 6; ++i) v[i] = y[0] + i;
  y[0] = last_of(v, at);
}
kernel void too_much_threadgroup(device float* y [[buffer(0)]]) {
  threadgroup float a[8193];
  a[8192] = 1;
  y[0] = a[8192];
}
kernel void shift_too_far(device int* y [[buffer(0)]]) { y[0] = 1 << y[0]; }

kernel void wild(device uint* y [[buffer(0)]], constant ulong& at [[buffer(1)]]) {
  y[0] = y[at];
}
uint deep(device uint* y, uint n) {
  volatile uint v[512];
  for (uint i = 0; i < 512; ++i) v[i] = n;
  return n > y[0] ? v[n] : deep(y, n + 1) + v[n];
}
kernel void too_deep(device uint* y [[buffer(0)]]) { y[0] = deep(y, 0); }
kernel void divide(device uint* y [[buffer(0)]]) { y[0] = 7 / y[0]; }

kernel void collectives(device float* y [[buffer(0)]], const device float* x [[buffer(1)]],
                        device uint* u [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
  const float v = x[i];
  device float* out = y + 12 * i;
  out[0] = simd_sum(v);
  out[1] = simd_max(v);
  out[2] = simd_min(v);
  out[3] = simd_shuffle_xor(v, 5);
  out[4] = simd_shuffle_down(v, 3);
  out[5] = simd_shuffle_up(v, 2);
  out[6] = simd_shuffle(v, 31 - lane);
  out[7] = simd_broadcast(v, 9);
  out[8] = simd_broadcast_first(v);
  out[9] = simd_prefix_inclusive_sum(v);
  out[10] = simd_prefix_exclusive_sum(v);
  out[11] = simd_sum(float4(v, 1, 2, 3)).w;
  u[2 * i] = simd_and(i | 64);
  u[2 * i + 1] = simd_or(1u << lane);
}

template <typename T>
kernel void matrices(device float* y [[buffer(0)]], const device T* a [[buffer(1)]],
                     const device T* b [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup T tile[8 * 12];
  for (uint i = lane; i < 64; i += 32) tile[i / 8 * 12 + i % 8] = b[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<T, 8, 8> left, right, turned;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(left, a, 16, ulong2(8, 0));
  simdgroup_load(right, tile, 12);
  simdgroup_load(turned, tile, 12, 0, true);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, y, 8);
  simdgroup_multiply(sum, left, turned);
  simdgroup_store(sum, y + 64, 8);
  sum = simdgroup_matrix<float, 8, 8>(3.0f);
  thread auto& held = sum.thread_elements();
  held[0] += lane;
  simdgroup_store(sum, y + 128, 8, 0, true);
}
template [[host_name("matrices_half")]] [[kernel]] decltype(matrices<half>) matrices<half>;
template [[host_name("matrices_bfloat")]] [[kernel]] decltype(matrices<bfloat>) matrices<bfloat>;

template <typename T>
kernel void arithmetic(device T* y [[buffer(0)]], const device T* a [[buffer(1)]],
                       const device T* b [[buffer(2)]], const device T* c [[buffer(3)]],
                       uint i [[thread_position_in_grid]]) {
  y[6 * i] = a[i] * b[i];
  y[6 * i + 1] = a[i] * b[i] + c[i];
  y[6 * i + 2] = a[i] / b[i];
  y[6 * i + 3] = fma(a[i], b[i], c[i]);
  vec<T, 2> v = vec<T, 2>(a[i], b[i]) * vec<T, 2>(b[i], c[i]);
  y[6 * i + 4] = v.x + v.y;
  y[6 * i + 5] = T(float(a[i]) * float(b[i]));
}
template [[host_name("arithmetic_half")]] [[kernel]] decltype(arithmetic<half>) arithmetic<half>;
template [[host_name("arithmetic_bfloat")]] [[kernel]] decltype(arithmetic<bfloat>)
    arithmetic<bfloat>;

kernel void literals(device float* y [[buffer(0)]], const device float* x [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * 1.1 + 1e-1;
}
kernel void subnormal(device float* y [[buffer(0)]], const device uint* q [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  const half2 h = as_type<half2>(q[i] & 0x000f000f);
  const float2 wide = static_cast<float2>(h) * 0x1p24f;
  y[2 * i] = wide.x;
  y[2 * i + 1] = wide.y;
}

constant float table[4] = {1.5, 2.5, 3.5h, 4.5bf};
constant bool twice [[function_constant(0)]];
kernel void language(device float* y [[buffer(0)]], device uchar* bytes [[buffer(1)]],
                     uint2 at [[thread_position_in_grid]], uint2 size [[threads_per_grid]]) {
  const uint i = at.y * size.x + at.x;
  float4 v(table[i % 4]);
  v.zw = float2(i, 1.0 / 3);
  v.xy = v.yx * 2;
  y[i] = dot(v, float4(1, float3(1))) * (twice ? 2 : 1);
  uchar4 four = uchar4(as_type<uchar4>(0x04030201u).wzyx);
  bytes[i] = four[i % 4] + uchar(popcount(i) + extract_bits(0xabcdu, 4u, 4u)) +
      uchar(select(1, 2, i > 3) + max(int(i), 2) + clamp(int(i), 1, 3));
}
"""
)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(KERNELS)


def test_whole_source_passes_the_checks_but_for_its_recursion(library: Library) -> None:
    library.check_address_spaces()
    with pytest.raises(CompileError) as error:
        library.check_forbidden()
    assert str(error.value) == "deep: Metal does not have recursion"


def random_q4k(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    blocks = rng.integers(0, 256, (rows, k // 256, 144), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (rows, k // 256, 2)).astype(np.float16)
    blocks[:, :, :4] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The uint16 patterns of values rounded to bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
@pytest.mark.parametrize(("rows", "k"), [(1, 256), (5, 768), (8, 1024)])
def test_q4k_gemv_equals_gguf(library: Library, dtype: str, rows: int, k: int) -> None:
    rng = np.random.default_rng(rows)
    w = random_q4k(rng, rows, k)
    x = rng.standard_normal(k).astype(np.float32)
    if dtype == "bfloat":
        given, y = bfloat16(x), np.zeros(rows, np.uint16)
        x = from_bfloat16(given)
    else:
        given = x.astype(np.float16 if dtype == "half" else np.float32)
        y, x = np.zeros(rows, given.dtype), given
    shape = np.array([rows, k], np.uint32)
    library.run(f"q4k_{dtype}", (-(-rows // 2),), (64,), {0: y, 1: given, 2: w, 3: shape})
    result = from_bfloat16(y) if dtype == "bfloat" else y
    dense = gguf.quants.dequantize(w, gguf.GGMLQuantizationType.Q4_K).astype(np.float64)
    expected = dense @ x.astype(np.float64)
    bound = {"float": 2e-6, "half": 1e-3, "bfloat": 8e-3}[dtype]
    assert np.linalg.norm(result - expected) <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize("guard", ["start", "end"])
@pytest.mark.parametrize("sanitize", [True, False])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_one_byte_beyond_a_buffer(shift: int, sanitize: bool, guard: str) -> None:
    library = Library(KERNELS, ["copy_shifted", "store_shifted"], sanitize=sanitize)
    source = np.arange(48, dtype=np.uint8)  # A multiple of 16: guard pages alone are exact.
    target = np.zeros(48, np.uint8)

    def load() -> None:
        buffers = {0: target, 1: source, 2: np.int32(shift), 3: np.int32(48)}
        library.run("copy_shifted", (1,), (64,), buffers, guard=guard)

    def store() -> None:
        library.run("store_shifted", (1,), (48,), {0: target, 1: np.int32(shift)}, guard=guard)

    caught = shift and (sanitize or (shift < 0) == (guard == "start"))
    for action, index in ((load, 1), (store, 0)):
        if caught:
            offset = -1 if shift < 0 else 48
            with pytest.raises(
                EmulatorError, match=rf"buffer {index} of 48 bytes.* at offset {offset}\b"
            ):
                action()
        else:
            action()
    if not shift:
        assert (target == np.arange(48)).all()


@pytest.mark.parametrize("size", [1, 7, 13, 34])
@pytest.mark.parametrize("offset", [0, 3, 18])
def test_bounds_are_exact_at_odd_sizes(library: Library, size: int, offset: int) -> None:
    source = np.arange(size, dtype=np.uint8)
    for shift in (-1, 0, 1):
        target = np.zeros(size, np.uint8)
        buffers = {0: target, 1: source, 2: np.int32(shift), 3: np.int32(size)}
        if shift:
            with pytest.raises(EmulatorError, match="buffer 1"):
                library.run("copy_shifted", (1,), (size,), buffers, offsets={1: offset})
        else:
            library.run("copy_shifted", (1,), (size,), buffers, offsets={1: offset})
            assert (target == source).all()


def test_misaligned_load_is_refused(library: Library) -> None:
    data, y = np.arange(16, dtype=np.uint8), np.zeros(1, np.uint32)
    library.run("wide_load", (1,), (1,), {0: y, 1: data, 2: np.uint32(4)})
    assert y[0] == 0x07060504
    for at, offset in ((2, 0), (4, 2)):
        with pytest.raises(EmulatorError, match="misaligned"):
            library.run(
                "wide_load", (1,), (1,), {0: y, 1: data, 2: np.uint32(at)}, offsets={1: offset}
            )


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("uneven_barrier", "lane 8 of simdgroup 1 has returned"),
        ("uneven_sum", "lane 5 of simdgroup 0 has returned"),
        ("two_sums", "is at simd_sum"),
    ],
)
def test_divergent_collectives_are_refused(library: Library, kernel: str, said: str) -> None:
    y = np.zeros(64, np.float32)
    with pytest.raises(EmulatorError, match=rf"\[{kernel}\].*{said}"):
        library.run(kernel, (1,), (64,), {0: y})
    # The next run starts afresh.
    library.run("missing_barrier", (1,), (64,), {0: y})


def test_threadgroup_memory_and_its_poison(library: Library) -> None:
    x = np.arange(96, dtype=np.float32) + 1
    y = np.zeros(288, np.float32)
    for fill in (True, False):
        library.run(
            "reverse_in_threadgroup", (2,), (96,), {0: y, 1: x, 2: fill}, threadgroup={0: 384}
        )
        assert (y[96:192] == x[::-1]).all()
        assert (y[192:] == x[::-1] + 1).all()
        if fill:
            assert (y[:96] == x[::-1]).all()
        else:
            assert np.isnan(y[:96]).all()
    with pytest.raises(EmulatorError, match="threadgroup argument 0 of 380 bytes"):
        library.run(
            "reverse_in_threadgroup", (1,), (96,), {0: y, 1: x, 2: True}, threadgroup={0: 380}
        )


def test_missing_barrier_shows(library: Library) -> None:
    forward, backward = np.zeros(64, np.float32), np.zeros(64, np.float32)
    library.run("missing_barrier", (1,), (64,), {0: forward})
    library.run("missing_barrier", (1,), (64,), {0: backward}, order="reverse")
    assert np.isnan(forward).any()
    assert not np.array_equal(forward, backward, equal_nan=True)


@pytest.mark.parametrize(
    ("kernel", "at", "said"),
    [("beyond_threadgroup", 7, "threadgroup array 0 of 28"), ("beyond_local", 6, "thread's array")],
)
def test_arrays_have_exact_bounds(library: Library, kernel: str, at: int, said: str) -> None:
    y = np.zeros(1, np.float32)
    library.run(kernel, (1,), (1,), {0: y, 1: np.uint32(at - 1)})
    with pytest.raises(EmulatorError, match=said):
        library.run(kernel, (1,), (1,), {0: y, 1: np.uint32(at)})


def test_undefined_behaviour_and_limits(library: Library) -> None:
    with pytest.raises(EmulatorError, match=r"a shift .*source\.metal"):
        library.run("shift_too_far", (1,), (1,), {0: np.array([40], np.int32)})
    with pytest.raises(EmulatorError, match="at most 32768 bytes of threadgroup memory"):
        library.run("too_much_threadgroup", (1,), (1,), {0: np.zeros(1, np.float32)})
    with pytest.raises(EmulatorError, match="1 to 64 threads"):
        library.run("q4k_float", (1,), (65,), {0: b"", 1: b"", 2: b"", 3: b""})
    with pytest.raises(EmulatorError, match=r"buffers \[0, 1\]"):
        library.run("store_shifted", (1,), (1,), {0: np.zeros(1, np.uint8)})
    with pytest.raises(EmulatorError, match="buffer 0 to stay unchanged"):
        library.run("store_shifted", (1,), (4,), {0: b"\xff" * 4, 1: 0})


@pytest.mark.parametrize("sanitize", [True, False])
def test_faults_are_errors_of_the_kernel(sanitize: bool) -> None:
    library = Library(KERNELS, ["wild", "too_deep", "divide"], sanitize=sanitize)
    y = np.array([511], np.uint32)
    library.run("too_deep", (1,), (1,), {0: np.array([20], np.uint32)})
    with pytest.raises(EmulatorError, match="less stack"):
        library.run("too_deep", (1,), (32,), {0: y})
    for at in (2**20, 2**36, 2**60):
        with pytest.raises(EmulatorError, match="wild"):
            library.run("wild", (1,), (1,), {0: y, 1: np.uint64(at)})
    with pytest.raises(EmulatorError, match="division"):
        library.run("divide", (1,), (1,), {0: y * 0})
    library.run("divide", (1,), (1,), {0: y})
    assert y[0] == 7 // 511


@pytest.mark.parametrize("threads", [32, 128])
def test_simd_collectives_equal_numpy(library: Library, threads: int) -> None:
    rng = np.random.default_rng(threads)
    x = rng.integers(-50, 50, threads).astype(np.float32)
    y, u = np.zeros((threads, 12), np.float32), np.zeros((threads, 2), np.uint32)
    library.run("collectives", (1,), (threads,), {0: y, 1: x, 2: u})
    lane = np.arange(32)
    for group in range(threads // 32):
        v = x[32 * group :][:32]
        expected = [
            np.full(32, v.sum()),
            np.full(32, v.max()),
            np.full(32, v.min()),
            v[lane ^ 5],
            np.where(lane + 3 < 32, v[np.minimum(lane + 3, 31)], v),
            np.where(lane >= 2, v[np.maximum(lane - 2, 0)], v),
            v[::-1],
            np.full(32, v[9]),
            np.full(32, v[0]),
            np.cumsum(v),
            np.cumsum(v) - v,
            np.full(32, 96),
        ]
        rows = slice(32 * group, 32 * group + 32)
        assert np.array_equal(y[rows].T, np.stack(expected))
        assert (u[rows, 0] == np.bitwise_and.reduce(np.arange(threads)[rows] | 64)).all()
        assert (u[rows, 1] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_simdgroup_matrix_equals_numpy(library: Library, dtype: str) -> None:
    rng = np.random.default_rng(8)
    a, b = rng.integers(-9, 9, (8, 16)), rng.integers(-9, 9, (8, 8))
    stored = [
        m.astype(np.float16) if dtype == "half" else bfloat16(m.astype(np.float32)) for m in (a, b)
    ]
    y = np.zeros((3, 8, 8), np.float32)
    library.run(f"matrices_{dtype}", (1,), (32,), {0: y, 1: stored[0], 2: stored[1]})
    assert np.array_equal(y[0], a[:, 8:] @ b + 1)
    assert np.array_equal(y[1], a[:, 8:] @ b.T)
    # Each even column of the matrix is a lane's first element; its lane was added.
    diagonal = y[2].T - 3 * np.eye(8)
    assert (diagonal[:, 1::2] == 0).all()
    assert sorted(diagonal[:, ::2].ravel()) == list(range(32))
    assert list(diagonal[0, ::2]) == [0, 1, 8, 9]
    assert list(diagonal[:, 0]) == [0, 2, 4, 6, 16, 18, 20, 22]


def nearest_half(value: Fraction) -> np.float16:
    """The float16 nearest to an exact value, ties to even."""
    guess = np.float16(float(value))
    choices = [
        guess,
        np.nextafter(guess, np.float16(np.inf)),
        np.nextafter(guess, -np.float16(np.inf)),
    ]
    choices = [c for c in choices if np.isfinite(c)]
    return min(choices, key=lambda c: (abs(Fraction(float(c)) - value), c.view(np.uint16) & 1))


def test_half_rounds_every_operation(library: Library) -> None:
    rng = np.random.default_rng(16)
    scale = 2.0 ** rng.integers(-7, 5, (3, 512))
    a, b, c = (rng.standard_normal((3, 512)) * scale).astype(np.float16)
    a[:64] = rng.integers(1, 1024, 64).astype(np.uint16).view(np.float16)  # Subnormal.
    y = np.zeros((512, 6), np.float16)
    library.run("arithmetic_half", (16,), (32,), {0: y, 1: a, 2: b, 3: c})
    exact = [[Fraction(float(v)) for v in row] for row in np.stack([a, b, c], 1)]
    product, wide = a * b, a.astype(np.float32) * b.astype(np.float32)
    expected = [
        product,
        product + c,
        a / b,
        np.array([nearest_half(p * q + r) for p, q, r in exact]),
        product + b * c,
        wide.astype(np.float16),
    ]
    for i, e in enumerate(expected):
        assert np.array_equal(y[:, i].view(np.uint16), e.view(np.uint16)), i


def test_bfloat_rounds_every_operation(library: Library) -> None:
    rng = np.random.default_rng(17)
    bits = bfloat16(rng.standard_normal((3, 512)))
    a, b, c = (from_bfloat16(v) for v in bits)
    y = np.zeros((512, 6), np.uint16)
    library.run("arithmetic_bfloat", (16,), (32,), {0: y, 1: bits[0], 2: bits[1], 3: bits[2]})
    product = from_bfloat16(bfloat16(a * b))
    assert np.array_equal(y[:, 0], bfloat16(a * b))
    assert np.array_equal(y[:, 1], bfloat16(product + c))
    assert np.array_equal(y[:, 2], bfloat16(a / b))
    assert np.array_equal(y[:, 5], bfloat16(a * b))


@pytest.mark.parametrize(("dtype", "ulp", "tiny"), [("half", -10, -24), ("bfloat", -7, -100)])
def test_fma_rounds_once(library: Library, dtype: str, ulp: int, tiny: int) -> None:
    # The products lie halfway between two values; the sign of a tiny addend decides.
    b = np.repeat(1 + np.array([1, 3]) * 2.0**ulp, 3)
    a, c = np.full(6, 1.5), np.tile([-(2.0**tiny), 0, 2.0**tiny], 2)
    expected = 1.5 + np.array([1, 2, 2, 4, 4, 5]) * 2.0**ulp
    narrow = np.float16 if dtype == "half" else bfloat16
    given = [narrow(v) for v in (a, b, c)]
    y = np.zeros((6, 6), given[0].dtype)
    library.run(f"arithmetic_{dtype}", (1,), (6,), dict(enumerate([y, *given])))
    result = y[:, 3] if dtype == "half" else from_bfloat16(y[:, 3])
    assert np.array_equal(result, expected)


def test_literals_are_float(library: Library) -> None:
    x = np.linspace(0, 1, 64, dtype=np.float32)
    y = np.zeros_like(x)
    library.run("literals", (2,), (32,), {0: y, 1: x})
    assert np.array_equal(y, x * np.float32(1.1) + np.float32(0.1))


@pytest.mark.parametrize("flush", [False, True])
def test_half_subnormals_live_unless_flushed(flush: bool) -> None:
    library = Library(KERNELS, ["subnormal", "arithmetic_half"], flush_half=flush)
    rng = np.random.default_rng(1)
    q = rng.integers(0, 2**32, 64, dtype=np.uint32)
    y = np.ones((64, 2), np.float32)
    library.run("subnormal", (2,), (32,), {0: y, 1: q})
    expected = np.stack([q & 15, q >> 16 & 15], 1)
    assert np.array_equal(y, 0 * expected if flush else expected)
    a, b = np.full(32, 0.01, np.float16), np.full(32, 0.001, np.float16)
    z = np.zeros((32, 6), np.float16)
    library.run("arithmetic_half", (1,), (32,), {0: z, 1: a, 2: b, 3: a})
    assert (z[:, 0] == (0 if flush else a * b)).all()


def test_vectors_literals_and_function_constants(library: Library) -> None:
    y, b = np.zeros(8, np.float32), np.zeros(8, np.uint8)
    i = np.arange(8)
    table = np.array([1.5, 2.5, 3.5, 4.5], np.float32)[i % 4]
    for twice in (False, True):
        library.run("language", (2, 2), (2, 1), {0: y, 1: b}, constants={0: twice})
        expected = (4 * table + i + np.float32(1 / 3)) * (1 + twice)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    bits = np.array([bin(k).count("1") for k in i])
    expected = (4 - i % 4) + bits + 0xC + np.where(i > 3, 2, 1) + np.maximum(i, 2) + i.clip(1, 3)
    assert np.array_equal(b, expected)
    with pytest.raises(EmulatorError, match="function constant"):
        library.run("language", (2, 2), (2, 1), {0: y, 1: b})


def test_trace_counts_loads(library: Library) -> None:
    rng = np.random.default_rng(3)
    w, x = random_q4k(rng, 4, 512), np.ones(512, np.float16)
    buffers = {0: np.zeros(4, np.float16), 1: x, 2: w, 3: np.array([4, 512], np.uint32)}
    report = library.trace("q4k_half", (2,), (64,), buffers)
    weights = report[2]
    assert weights.size == w.nbytes == weights.distinct_loaded
    assert (report[0].stored, report[0].distinct_stored, report[0].loaded) == (8, 8, 0)
    assert report[1].loaded == 4 * x.nbytes
    # 32 lanes load 4 words of 2 bytes of quants; scales are shared and so loaded more often.
    quants = report.records[
        (report.records["buffer"] == 2) & (report.records["offset"] % 144 >= 16)
    ]
    assert quants["size"].sum() == w.size * 128 // 144
    assert set(quants["size"]) == {2}
    assert "q4k_half" in str(report)


def test_trace_groups_lanes_into_instructions(library: Library) -> None:
    source, target = np.arange(128, dtype=np.uint8), np.zeros(128, np.uint8)
    buffers = {0: target, 1: source, 2: np.int32(0), 3: np.int32(128)}
    report = library.trace("copy_shifted", (2,), (64,), buffers)
    traffic = report[1]
    assert traffic.widths == {1: 128}
    assert traffic.runs == {1: 128}
    assert (traffic.instructions, traffic.fetched, traffic.most_fetches_of_a_byte) == (4, 128, 1)
    assert traffic.segments == {32: 4, 64: 4, 128: 4}
    assert report[3].fetched == 4 * 4
    assert report[3].loaded == 128 * 4


SPACES = HEAD + "kernel void k(device float* y [[buffer(0)]], constant float& c [[buffer(1)]]) {"


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float* p = y; y[0] = *p; }",
        "thread float* p = (thread float*)y; y[0] = *p; }",
        "thread float* p = y; y[0] = *p; }",
        "device const float* p = &c; y[0] = *p; }",
        "threadgroup float t[4]; device float* p = t; y[0] = *p; }",
        "auto p = reinterpret_cast<threadgroup float*>(y); y[0] = *p; }",
        "float v = 1; device float* p = &v; y[0] = *p; }",
        "constant float* p = &c; *p = 1; }",
    ],
)
def test_wrong_address_space_is_refused(body: str) -> None:
    with pytest.raises(CompileError):
        Library(SPACES + body, compile=False).check_address_spaces()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("float f(device float* p, uint n) { return n ? f(p, n - 1) : *p; }", "recursion"),
        ("float f(float a) { double b = a; return b; }", "double"),
        ("struct S { virtual float f() { return 1; } };", "virtual"),
        ("float f(float a) { throw 1; }", "exceptions"),
        ("float f(float a) { static float b = a; return b; }", "static"),
        ("float f(float a) { auto g = [&](float b) { return a + b; }; return g(1); }", "lambda"),
        ("float f(float a) { thread float* b = new float(a); return *b; }", "new"),
        ("float f(float a) { goto out; out: return a; }", "goto"),
        ("float f(float (*g)(float)) { return g(1); }", "pointers to functions"),
        ("float f(const float* p) { return *p; }", "address space"),
        ("float f(thread float& a) { float& b = a; return b; }", "address space"),
        ("struct S { float* p; };", "address space"),
        ("float limit = 3;", "program scope"),
        ("float f(float a) { threadgroup float t[4]; t[0] = a; return t[0]; }", "outside kernels"),
        ("float f(int4 a) { float4 b = (float4)a; return b.x; }", "reinterpret"),
        (
            "template <class T> T f(int4 a) { return (T)a; } float4 g() { return f<float4>(1); }",
            "reinterpret",
        ),
        ("float f(float4 a, float4 b) { return float4(a < b).x; }", "comparing vectors"),
        ("struct S { static constexpr uint n = 4; };", "program scope"),
        (
            "float f(device float* p, uint n) { float v[n]; v[0] = *p; return v[0]; }",
            "variable length",
        ),
        ("float4 f(half4 a) { float4 b = a; return b; }", "cannot initialize"),
        ("uint4 f(int4 a) { return a; }", "cannot"),
        ("kernel int g(device float* y [[buffer(0)]]) { return 1; }", "return a value"),
    ],
)
def test_what_metal_lacks_is_refused(text: str, said: str) -> None:
    good = "kernel void k(device float* y [[buffer(0)]]) { y[0] = 1.0; }\n"
    if "float f(device float* p" in text:
        good = good.replace("1.0", "f(y, 3)")
    source = HEAD + text + "\n" + good
    with pytest.raises(CompileError, match=said):
        Library(source, compile=False).check_forbidden()


def test_compiler_errors_name_the_line() -> None:
    with pytest.raises(CompileError, match=r"source\.metal:5"):
        Library(HEAD + "kernel void k(device float* y [[buffer(0)]]) {\n  y[0] = z;\n}\n")
    with pytest.raises(CompileError, match="no kernel called other"):
        Library(KERNELS, ["other"])


def test_only_metals_headers_can_be_included() -> None:
    for name in ("math.h", "stdio.h"):
        with pytest.raises(CompileError, match=rf"not have <{name}>"):
            Library(f"#include <{name}>\n" + HEAD)
