// Sixteen float32 lanes: the one vector type every kernel is written over.
//
// Three builds (AVX-512, AVX2 + FMA, plain C++) have the same meaning lane for lane: every operation is one
// correctly rounded IEEE 754 operation, `fma` rounds once, and `sum` is the tree (i, i + 8), (i, i + 4), (i, i + 2),
// (i, i + 1). So all builds give the same bits, which the tests check by comparing them. `load_words` and `store_words`
// move sixteen words of 32 bits, whatever they hold.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "bf16.h"

// LOCKSTEP_EMULATE_AVX512 runs the AVX-512 code on a processor without it: for tests.
#if defined(LOCKSTEP_EMULATE_AVX512)
#include "emulate512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) || defined(LOCKSTEP_EMULATE_AVX512)
#define LOCKSTEP_AVX512
#endif

namespace lockstep {

#if defined(LOCKSTEP_AVX512)

struct F16 {
  __m512 v;
  static F16 zero() { return {_mm512_setzero_ps()}; }
  static F16 all(float x) { return {_mm512_set1_ps(x)}; }
  static F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F16 load(const bf16* p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
  }
  static F16 load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
  }
  static F16 load_words(const void* p) { return {_mm512_loadu_ps(p)}; }
  void store_words(void* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const {
    __m512i u = _mm512_castps_si512(v);
    __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), lsb), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_blend_epi32(nan, r, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
  }
};
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 sqrt(F16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 nearest(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a < b ? x : y, lane by lane (a NaN compares false).
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// 2^n for integral n in [-126, 127].
inline F16 power_of_two(F16 n) {
  __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}

#elif defined(__AVX2__) && defined(__FMA__)

struct F16 {
  __m256 a, b;
  static F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F16 all(float x) {
    __m256 v = _mm256_set1_ps(x);
    return {v, v};
  }
  static F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
  static F16 load(const bf16* p) {
    return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
  }
  static __m256 widen8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  static F16 load(const int8_t* p) { return {widen8(p), widen8(p + 8)}; }
  static F16 load_words(const void* p) { return load(static_cast<const float*>(p)); }
  void store_words(void* p) const { store(static_cast<float*>(p)); }
  void store(float* p) const {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  static __m256i narrow(__m256 v) {
    __m256i u = _mm256_castps_si256(v);
    __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lsb), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  }
  void store(bf16* p) const {
    __m256i packed = _mm256_packus_epi32(narrow(a), narrow(b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
  }
};
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 sqrt(F16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 nearest(F16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline F16 where_less(F16 p, F16 q, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}
inline __m256 power_of_two8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F16 power_of_two(F16 n) { return {power_of_two8(n.a), power_of_two8(n.b)}; }

#else

struct F16 {
  float v[16];
  static F16 zero() { return all(0.0f); }
  static F16 all(float x) {
    F16 r;
    for (int i = 0; i < 16; i++) r.v[i] = x;
    return r;
  }
  template <typename T>
  static F16 load(const T* p) {
    F16 r;
    for (int i = 0; i < 16; i++) r.v[i] = to_float(p[i]);
    return r;
  }
  static F16 load_words(const void* p) {
    F16 r;
    std::memcpy(r.v, p, sizeof(r.v));
    return r;
  }
  void store_words(void* p) const { std::memcpy(p, v, sizeof(v)); }
  template <typename T>
  void store(T* p) const {
    for (int i = 0; i < 16; i++) from_float(v[i], p + i);
  }
};
template <typename F>
inline F16 lanes(F16 a, F16 b, F f) {
  F16 r;
  for (int i = 0; i < 16; i++) r.v[i] = f(a.v[i], b.v[i]);
  return r;
}
inline F16 operator+(F16 a, F16 b) { return lanes(a, b, [](float x, float y) { return x + y; }); }
inline F16 operator-(F16 a, F16 b) { return lanes(a, b, [](float x, float y) { return x - y; }); }
inline F16 operator*(F16 a, F16 b) { return lanes(a, b, [](float x, float y) { return x * y; }); }
inline F16 operator/(F16 a, F16 b) { return lanes(a, b, [](float x, float y) { return x / y; }); }
inline F16 fma(F16 a, F16 b, F16 c) {
  F16 r;
  for (int i = 0; i < 16; i++) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
}
inline F16 sqrt(F16 a) { return lanes(a, a, [](float x, float) { return std::sqrt(x); }); }
// As the x86 instructions: the second operand where either is NaN.
inline F16 max(F16 a, F16 b) { return lanes(a, b, [](float x, float y) { return x > y ? x : y; }); }
inline F16 min(F16 a, F16 b) { return lanes(a, b, [](float x, float y) { return x < y ? x : y; }); }
inline F16 nearest(F16 a) { return lanes(a, a, [](float x, float) { return std::nearbyint(x); }); }
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) {
  F16 r;
  for (int i = 0; i < 16; i++) r.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return r;
}
inline F16 power_of_two(F16 n) {
  F16 r;
  for (int i = 0; i < 16; i++) {
    // The out-of-range result of the x86 conversion (NaN, overflow), so that builds agree there too.
    bool fits = n.v[i] > -2147483648.0f && n.v[i] < 2147483648.0f;
    uint32_t e = (fits ? uint32_t(int32_t(n.v[i])) : 0x80000000u) + 127u;
    e <<= 23;
    std::memcpy(&r.v[i], &e, 4);
  }
  return r;
}

#endif

// Sixteen lanes in the order in which memory is widened fastest: `split` puts lanes into it, `joined` back. A bfloat16
// is half of a 32-bit word, so with AVX2 the even lanes are the words shifted and the odd ones the words masked: half
// the instructions of widening them in order. Elsewhere, and for other types, the order is the lanes' own.
#if defined(__AVX2__) && defined(__FMA__) && !defined(LOCKSTEP_AVX512)

inline F16 load_split(const float* p) { return F16::load(p); }
inline F16 load_split(const int8_t* p) { return F16::load(p); }
inline F16 load_split(const bf16* p) {
  const __m256i words = _mm256_loadu_si256((const __m256i*)p);
  const __m256i odd = _mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000u)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), _mm256_castsi256_ps(odd)};
}
template <typename T>
inline F16 split(F16 x) {
  if constexpr (!std::is_same_v<T, bf16>) return x;
  const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(x.a, x.b, 0x88));
  const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(x.a, x.b, 0xdd));
  return {_mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8)), _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8))};
}
template <typename T>
inline F16 joined(F16 x) {
  if constexpr (!std::is_same_v<T, bf16>) return x;
  const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

#else

template <typename T>
inline F16 load_split(const T* p) {
  return F16::load(p);
}
template <typename T>
inline F16 split(F16 x) {
  return x;
}
template <typename T>
inline F16 joined(F16 x) {
  return x;
}

#endif

// Sum and maximum of the lanes: the binary tree that joins lane i with lane i + 8, then i + 4, i + 2, i + 1.
#if defined(__AVX2__) && defined(__FMA__)

inline __m256 lower(F16 x) {
#if defined(LOCKSTEP_AVX512)
  return _mm512_castps512_ps256(x.v);
#else
  return x.a;
#endif
}
inline __m256 upper(F16 x) {
#if defined(LOCKSTEP_AVX512)
  return _mm512_extractf32x8_ps(x.v, 1);
#else
  return x.b;
#endif
}
inline float sum(F16 x) {
  const __m256 t = _mm256_add_ps(lower(x), upper(x));
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
inline float largest(F16 x) {
  const __m256 t = _mm256_max_ps(lower(x), upper(x));
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}

#else

inline float sum(F16 x) {
  float t[16];
  x.store(t);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) t[i] = t[i] + t[i + half];
  return t[0];
}
inline float largest(F16 x) {
  float t[16];
  x.store(t);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
}

#endif

// The first n lanes from memory, the others `fill`; and the first n lanes to memory. For the tail of a row.
template <typename T>
inline F16 load_part(const T* p, int64_t n, float fill = 0.0f) {
  if (n >= 16) return F16::load(p);
  float t[16];
  for (int i = 0; i < 16; i++) t[i] = i < n ? to_float(p[i]) : fill;
  return F16::load(t);
}
template <typename T>
inline void store_part(F16 x, T* p, int64_t n) {
  if (n >= 16) return x.store(p);
  float t[16];
  x.store(t);
  for (int i = 0; i < n; i++) from_float(t[i], p + i);
}

}  // namespace lockstep
