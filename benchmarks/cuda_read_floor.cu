// The read floor: every 16 bytes of w once, eight loads in flight, nothing else.
extern "C" __global__ void read_floor(
    const uint4* w, unsigned long long count, unsigned* out) {
  unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned long long i = blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x;
  unsigned sum = 0;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = __ldcs(w + i + j * step);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
  }
  for (; i < count; i += step) {
    uint4 v = __ldcs(w + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) { // so that the loads are not left out
    *out = sum;
  }
}
