// Every tensor type's block as a struct with its decode, from the formulas of
// the format (ggml's block definitions). Included once per instruction set.
// A decode writes `size` floats; products are exact in f32 but for one
// rounding, so all instruction sets agree to the bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/convert.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

template <typename T>
T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

float read_half(const uint8_t* p) {
  return half_to_float(read<uint16_t>(p));
}

struct F32 {
  static constexpr uint32_t id = 0;
  static constexpr int size = 1, bytes = 4;
  static void decode(const uint8_t* b, float* out) {
    *out = read<float>(b);
  }
};

struct F16 {
  static constexpr uint32_t id = 1;
  static constexpr int size = 1, bytes = 2;
  static void decode(const uint8_t* b, float* out) {
    *out = read_half(b);
  }
};

struct BF16 {
  static constexpr uint32_t id = 30;
  static constexpr int size = 1, bytes = 2;
  static void decode(const uint8_t* b, float* out) {
    *out = bfloat_to_float(read<uint16_t>(b));
  }
};

// Blocks of 32 hold elements 0..15 in low nibbles and 16..31 in high ones.

struct Q4_0 {
  static constexpr uint32_t id = 2;
  static constexpr int size = 32, bytes = 18;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * ((b[2 + i] & 15) - 8);
      out[i + 16] = d * ((b[2 + i] >> 4) - 8);
    }
  }
};

struct Q4_1 {
  static constexpr uint32_t id = 3;
  static constexpr int size = 32, bytes = 20;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b), m = read_half(b + 2);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * (b[4 + i] & 15) + m;
      out[i + 16] = d * (b[4 + i] >> 4) + m;
    }
  }
};

struct Q5_0 {
  static constexpr uint32_t id = 6;
  static constexpr int size = 32, bytes = 22;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b);
    uint32_t high = read<uint32_t>(b + 2);
    for (int i = 0; i < 16; ++i) {
      int low = (b[6 + i] & 15) | ((high >> i & 1) << 4);
      int top = (b[6 + i] >> 4) | ((high >> (i + 16) & 1) << 4);
      out[i] = d * (low - 16);
      out[i + 16] = d * (top - 16);
    }
  }
};

struct Q5_1 {
  static constexpr uint32_t id = 7;
  static constexpr int size = 32, bytes = 24;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b), m = read_half(b + 2);
    uint32_t high = read<uint32_t>(b + 4);
    for (int i = 0; i < 16; ++i) {
      int low = (b[8 + i] & 15) | ((high >> i & 1) << 4);
      int top = (b[8 + i] >> 4) | ((high >> (i + 16) & 1) << 4);
      out[i] = d * low + m;
      out[i + 16] = d * top + m;
    }
  }
};

struct Q8_0 {
  static constexpr uint32_t id = 8;
  static constexpr int size = 32, bytes = 34;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b);
    for (int i = 0; i < 32; ++i) {
      out[i] = d * static_cast<int8_t>(b[2 + i]);
    }
  }
};

struct Q2_K {
  static constexpr uint32_t id = 10;
  static constexpr int size = 256, bytes = 84;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b + 80), dmin = read_half(b + 82);
    for (int group = 0; group < 16; ++group) {
      float scale = d * (b[group] & 15), min = dmin * (b[group] >> 4);
      // 128 weights share 32 bytes, a bit pair for each run of 32.
      const uint8_t* q = b + 16 + group / 8 * 32 + group % 2 * 16;
      int shift = group % 8 / 2 * 2;
      for (int i = 0; i < 16; ++i) {
        out[group * 16 + i] = scale * (q[i] >> shift & 3) - min;
      }
    }
  }
};

struct Q3_K {
  static constexpr uint32_t id = 11;
  static constexpr int size = 256, bytes = 110;
  static void decode(const uint8_t* b, float* out) {
    const uint8_t* s = b + 96;
    float d = read_half(b + 108);
    for (int group = 0; group < 16; ++group) {
      // Low nibbles of scales 0..7, high nibbles for 8..15; the top bit pairs
      // lie in the last four bytes.
      int low = s[group % 8] >> (group / 8 * 4) & 15;
      int top = s[8 + group % 4] >> (group / 4 * 2) & 3;
      float scale = d * ((low | top << 4) - 32);
      int run = group / 2; // of 32 weights
      const uint8_t* q = b + 32 + run / 4 * 32 + group % 2 * 16;
      const uint8_t* mask = b + group % 2 * 16;
      int shift = run % 4 * 2;
      for (int i = 0; i < 16; ++i) {
        int high = mask[i] >> run & 1;
        out[group * 16 + i] = scale * ((q[i] >> shift & 3) - (high ? 0 : 4));
      }
    }
  }
};

// Eight 6-bit scales and mins in 12 bytes (Q4_K, Q5_K).
struct ScalesMins {
  uint8_t scale[8], min[8];
  explicit ScalesMins(const uint8_t* s) {
    for (int j = 0; j < 4; ++j) {
      scale[j] = s[j] & 63;
      min[j] = s[j + 4] & 63;
      scale[j + 4] = (s[j + 8] & 15) | (s[j] >> 6) << 4;
      min[j + 4] = s[j + 8] >> 4 | (s[j + 4] >> 6) << 4;
    }
  }
};

struct Q4_K {
  static constexpr uint32_t id = 12;
  static constexpr int size = 256, bytes = 144;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b), dmin = read_half(b + 2);
    ScalesMins sm(b + 4);
    for (int group = 0; group < 8; ++group) {
      float scale = d * sm.scale[group], min = dmin * sm.min[group];
      const uint8_t* q = b + 16 + group / 2 * 32;
      int shift = group % 2 * 4;
      for (int i = 0; i < 32; ++i) {
        out[group * 32 + i] = scale * (q[i] >> shift & 15) - min;
      }
    }
  }
};

struct Q5_K {
  static constexpr uint32_t id = 13;
  static constexpr int size = 256, bytes = 176;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b), dmin = read_half(b + 2);
    ScalesMins sm(b + 4);
    const uint8_t* high = b + 16;
    for (int group = 0; group < 8; ++group) {
      float scale = d * sm.scale[group], min = dmin * sm.min[group];
      const uint8_t* q = b + 48 + group / 2 * 32;
      int shift = group % 2 * 4;
      for (int i = 0; i < 32; ++i) {
        int code = (q[i] >> shift & 15) | (high[i] >> group & 1) << 4;
        out[group * 32 + i] = scale * code - min;
      }
    }
  }
};

struct Q6_K {
  static constexpr uint32_t id = 14;
  static constexpr int size = 256, bytes = 210;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b + 208);
    for (int group = 0; group < 16; ++group) {
      float scale = d * static_cast<int8_t>(b[192 + group]);
      int run = group / 2 % 4; // of 32 weights within a half block
      int at = group % 2 * 16;
      const uint8_t* low = b + group / 8 * 64 + run % 2 * 32 + at;
      const uint8_t* high = b + 128 + group / 8 * 32 + at;
      int shift = run / 2 * 4;
      for (int i = 0; i < 16; ++i) {
        int code = (low[i] >> shift & 15) | (high[i] >> (2 * run) & 3) << 4;
        out[group * 16 + i] = scale * (code - 32);
      }
    }
  }
};

// The 4-bit codes of IQ4_NL and IQ4_XS.
constexpr int8_t iq4_values[16] = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL {
  static constexpr uint32_t id = 20;
  static constexpr int size = 32, bytes = 18;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * iq4_values[b[2 + i] & 15];
      out[i + 16] = d * iq4_values[b[2 + i] >> 4];
    }
  }
};

struct IQ4_XS {
  static constexpr uint32_t id = 23;
  static constexpr int size = 256, bytes = 136;
  static void decode(const uint8_t* b, float* out) {
    float d = read_half(b);
    uint16_t high = read<uint16_t>(b + 2);
    for (int group = 0; group < 8; ++group) {
      int low = b[4 + group / 2] >> (group % 2 * 4) & 15;
      float scale = d * ((low | (high >> (2 * group) & 3) << 4) - 32);
      const uint8_t* q = b + 8 + group * 16;
      for (int i = 0; i < 16; ++i) {
        out[group * 32 + i] = scale * iq4_values[q[i] & 15];
        out[group * 32 + i + 16] = scale * iq4_values[q[i] >> 4];
      }
    }
  }
};

// Twice the values of e2m1, so that they are whole; the exponent below is
// halved.
constexpr int8_t e2m1_doubled[16] = {
    0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct MXFP4 {
  static constexpr uint32_t id = 39;
  static constexpr int size = 32, bytes = 17;
  static void decode(const uint8_t* b, float* out) {
    float d = e8m0_half_to_float(b[0]);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * e2m1_doubled[b[1 + i] & 15];
      out[i + 16] = d * e2m1_doubled[b[1 + i] >> 4];
    }
  }
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
