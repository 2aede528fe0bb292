// AVX-512's intrinsics on a processor with AVX2, by SIMDe (https://github.com/simd-everywhere/simde) and, where it has
// none, here: so that tests can run the AVX-512 code anywhere.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace lockstep {
namespace emulated {

// Halves of a vector of 512 bits.
union Halves {
  float f[16];
  int32_t i[16];
};
inline Halves of(simde__m512 x) {
  Halves h;
  simde_mm512_storeu_ps(h.f, x);
  return h;
}
inline Halves of(simde__m512i x) {
  Halves h;
  simde_mm512_storeu_si512(h.i, x);
  return h;
}
inline __m256i half(const Halves& h, int n) { return _mm256_loadu_si256((const __m256i*)(h.i + 8 * n)); }
inline simde__m512i joined(__m256i low, __m256i high) {
  Halves h;
  _mm256_storeu_si256((__m256i*)h.i, low);
  _mm256_storeu_si256((__m256i*)(h.i + 8), high);
  return simde_mm512_loadu_si512(h.i);
}
inline simde__m512i cvtepu16_epi32(__m256i x) {
  return joined(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}
inline simde__m512i cvtepi8_epi32(__m128i x) {
  return joined(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
inline simde__m512 cvtepi32_ps(simde__m512i x) {
  Halves h = of(x);
  for (int n = 0; n < 2; n++) _mm256_storeu_ps(h.f + 8 * n, _mm256_cvtepi32_ps(half(h, n)));
  return simde_mm512_loadu_ps(h.f);
}
inline simde__m512i cvtps_epi32(simde__m512 x) {
  const Halves h = of(x);
  return joined(_mm256_cvtps_epi32(_mm256_loadu_ps(h.f)), _mm256_cvtps_epi32(_mm256_loadu_ps(h.f + 8)));
}
inline __m256i cvtepi32_epi16(simde__m512i x) {
  const Halves h = of(x);
  int16_t low[16];
  for (int n = 0; n < 16; n++) low[n] = int16_t(h.i[n]);
  return _mm256_loadu_si256((const __m256i*)low);
}
template <int n>
inline __m256 extractf32x8_ps(simde__m512 x) {
  const Halves h = of(x);
  return _mm256_loadu_ps(h.f + 8 * n);
}

}  // namespace emulated
}  // namespace lockstep

#define _mm512_cvtepu16_epi32 lockstep::emulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi32 lockstep::emulated::cvtepi8_epi32
#define _mm512_cvtepi32_ps lockstep::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 lockstep::emulated::cvtps_epi32
#define _mm512_cvtepi32_epi16 lockstep::emulated::cvtepi32_epi16
#define _mm512_extractf32x8_ps(x, n) lockstep::emulated::extractf32x8_ps<n>(x)
