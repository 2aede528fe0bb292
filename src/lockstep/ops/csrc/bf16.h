// A bfloat16 value, and the conversions of one number.
#pragma once

#include <cstdint>
#include <cstring>

namespace lockstep {

// The upper half of a float32. Distinct from uint16_t so that overloads choose by type.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return float(x); }
inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
// Round to nearest even; every NaN becomes the quiet 0x7FC0, as in PyTorch.
inline bf16 to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
inline void from_float(float x, float* y) { *y = x; }
inline void from_float(float x, bf16* y) { *y = to_bf16(x); }

}  // namespace lockstep
