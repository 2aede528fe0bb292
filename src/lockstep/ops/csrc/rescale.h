// Multiplication by 2^n, n <= 0, as an integer addition to the exponent (AMLA, arXiv 2509.25224).
//
// Exact wherever the result is a normal number. What is zero or subnormal, or would fall below the normal range,
// becomes +0: a plain addition would borrow from the sign and give a huge number. Infinities and NaNs stay.
#pragma once

#include "vec16.h"

namespace lockstep {

constexpr int LOWEST_POWER = -255;  // everything finite is 0 from here on, and (n << 23) still fits 32 bits

inline float times_power_of_two(float x, int n) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const int exponent = int(u >> 23 & 0xffu);
  if (exponent == 0xff) return x;
  if (exponent + n <= 0) return 0.0f;
  u += uint32_t(n) << 23;
  std::memcpy(&x, &u, 4);
  return x;
}

#if defined(LOCKSTEP_AVX512)

inline F16 times_power_of_two(F16 x, int n) {
  const __m512i u = _mm512_castps_si512(x.v), top = _mm512_set1_epi32(0xff);
  const __m512i exponent = _mm512_and_si512(_mm512_srli_epi32(u, 23), top);
  const __mmask16 fits = _mm512_cmpgt_epi32_mask(exponent, _mm512_set1_epi32(-n));
  const __m512i moved = _mm512_maskz_add_epi32(fits, u, _mm512_set1_epi32(int(uint32_t(n) << 23)));
  return {_mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(exponent, top), moved, u))};
}

#elif defined(__AVX2__) && defined(__FMA__)

inline __m256 times_power_of_two8(__m256 x, int n) {
  const __m256i u = _mm256_castps_si256(x), top = _mm256_set1_epi32(0xff);
  const __m256i exponent = _mm256_and_si256(_mm256_srli_epi32(u, 23), top);
  const __m256i fits = _mm256_cmpgt_epi32(exponent, _mm256_set1_epi32(-n));
  const __m256i moved = _mm256_and_si256(fits, _mm256_add_epi32(u, _mm256_set1_epi32(int(uint32_t(n) << 23))));
  return _mm256_castsi256_ps(_mm256_blendv_epi8(moved, u, _mm256_cmpeq_epi32(exponent, top)));
}
inline F16 times_power_of_two(F16 x, int n) { return {times_power_of_two8(x.a, n), times_power_of_two8(x.b, n)}; }

#else

inline F16 times_power_of_two(F16 x, int n) {
  for (int i = 0; i < 16; i++) x.v[i] = times_power_of_two(x.v[i], n);
  return x;
}

#endif

}  // namespace lockstep
