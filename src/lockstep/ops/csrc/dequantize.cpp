// Blocks of ggml's quantised formats to numbers: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
//
// Every value is a float32 product of an integer and a scale, plus or minus a float32 offset, each operation rounded
// once in the order of the `gguf` package (whose bits these are), and rounded to the output type at the end.
#include <cstring>

#include "kernels.h"
#include "team.h"
#include "vec16.h"

namespace lockstep {

namespace {

float half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  if (exponent == 0) {  // a multiple of the least subnormal, 2^-24
    const float value = float(fraction) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A format: its ggml number, the values of a block, their bytes, and how they become float32.

template <bool Offset>
struct Q4 {  // 4 bits: first the 16 low halves of the bytes, then the high ones
  static constexpr int kind = Offset ? 3 : 2, count = 32, bytes = Offset ? 20 : 18;
  static void read(const uint8_t* b, float* y) {
    const float d = half(b), m = Offset ? half(b + 2) : 0.0f;
    const uint8_t* q = b + (Offset ? 4 : 2);
    for (int i = 0; i < 16; i++) {
      const int low = q[i] & 15, high = q[i] >> 4;
      y[i] = Offset ? d * float(low) + m : d * float(low - 8);
      y[i + 16] = Offset ? d * float(high) + m : d * float(high - 8);
    }
  }
};

template <bool Offset>
struct Q5 {  // as Q4, the fifth bits of the 32 values in one word
  static constexpr int kind = Offset ? 7 : 6, count = 32, bytes = Offset ? 24 : 22;
  static void read(const uint8_t* b, float* y) {
    const float d = half(b), m = Offset ? half(b + 2) : 0.0f;
    const uint8_t* q = b + (Offset ? 8 : 6);
    uint32_t fifth;
    std::memcpy(&fifth, q - 4, 4);
    for (int i = 0; i < 16; i++) {
      const int low = (q[i] & 15) | int(fifth >> i & 1) << 4, high = q[i] >> 4 | int(fifth >> (i + 16) & 1) << 4;
      y[i] = Offset ? d * float(low) + m : d * float(low - 16);
      y[i + 16] = Offset ? d * float(high) + m : d * float(high - 16);
    }
  }
};

struct Q8 {
  static constexpr int kind = 8, count = 32, bytes = 34;
  static void read(const uint8_t* b, float* y) {
    const float d = half(b);
    for (int i = 0; i < 32; i++) y[i] = d * float(int8_t(b[2 + i]));
  }
};

// 8 groups of 32 values, each with a 6-bit scale and a 6-bit offset that share 12 bytes.
template <bool Fifth>
struct Q45K {
  static constexpr int kind = Fifth ? 13 : 12, count = 256, bytes = Fifth ? 176 : 144;
  static void read(const uint8_t* b, float* y) {
    const float d = half(b), dmin = half(b + 2);
    const uint8_t *s = b + 4, *fifth = b + 16, *q = b + (Fifth ? 48 : 16);
    for (int g = 0; g < 8; g++) {
      const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 2 & 48);
      const int offset = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 2 & 48);
      const float step = d * float(scale), m = dmin * float(offset);
      const uint8_t* group = q + g / 2 * 32;
      const int shift = g % 2 * 4;
      for (int i = 0; i < 32; i++) {
        const int high = Fifth ? (fifth[i] >> g & 1) << 4 : 0;
        y[g * 32 + i] = step * float((group[i] >> shift & 15) | high) - m;
      }
    }
  }
};

struct Q6K {  // two halves of 128: 4 low bits in 64 bytes, 2 high bits in 32; 16 groups with an 8-bit scale
  static constexpr int kind = 14, count = 256, bytes = 210;
  static void read(const uint8_t* b, float* y) {
    const float d = half(b + 208);
    for (int g = 0; g < 16; g++) {
      const int part = g / 8, row = g % 8 / 2, column = g % 2 * 16;
      const uint8_t *low = b + part * 64 + row % 2 * 32 + column, *high = b + 128 + part * 32 + column;
      const float step = d * float(int8_t(b[192 + g]));
      for (int i = 0; i < 16; i++)
        y[g * 16 + i] = step * float(((low[i] >> (row / 2 * 4) & 15) | (high[i] >> (row * 2) & 3) << 4) - 32);
    }
  }
};

template <typename Format, typename T>
bool run(int kind, const uint8_t* blocks, int64_t count, T* out) {
  if (kind != Format::kind) return false;
  each(count / Format::count, Format::count, [&](int64_t i) {
    float y[Format::count];
    Format::read(blocks + i * Format::bytes, y);
    for (int j = 0; j < Format::count; j += 16) F16::load(y + j).store(out + i * Format::count + j);
  });
  return true;
}

}  // namespace

template <typename T>
bool dequantize(int kind, const uint8_t* blocks, int64_t count, T* out) {
  return run<Q4<false>>(kind, blocks, count, out) || run<Q4<true>>(kind, blocks, count, out) ||
         run<Q5<false>>(kind, blocks, count, out) || run<Q5<true>>(kind, blocks, count, out) ||
         run<Q8>(kind, blocks, count, out) || run<Q45K<false>>(kind, blocks, count, out) ||
         run<Q45K<true>>(kind, blocks, count, out) || run<Q6K>(kind, blocks, count, out);
}

template bool dequantize(int, const uint8_t*, int64_t, float*);
template bool dequantize(int, const uint8_t*, int64_t, bf16*);

}  // namespace lockstep
