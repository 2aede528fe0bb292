// Sixteen pairs of bfloat16 values, and what AVX-512 BF16's vdpbf16ps does with two of them.
//
// fma(a, b, c) (the contract), lane by lane:
//
//   t = a.odd * b.odd + c,   result = a.even * b.even + t
//
// each a fused multiply-add that rounds once, to nearest even. Inputs below 2^-126 in magnitude are zeros of their sign,
// and so are t and the result where, rounded to 24 bits of whatever exponent, they are below it. The processor's modes
// of rounding and of flushing play no part. That is the instruction as Intel documents it ("FP32 FMA with daz in, ftz
// out and RNE rounding"); which NaN comes out of several is left open.
//
// Without the instruction two emulations give its bits: one over F16, and, where the AVX-512 code itself is emulated,
// the processor's own fused multiply-add in the mode in which it flushes.
#pragma once

#include "vec16.h"

namespace lockstep {

// Two neighbours in k. A `single` is a pair whose odd element is 0: the last of an odd number.
struct pair {
  bf16 even, odd;
};
struct single {
  bf16 even;
};

// An emulation is called, not copied into every tile, which would take the compiler minutes.
#define EMULATION __attribute__((noinline)) inline

// Sixteen pairs, as words.
inline F16 interleaved(const bf16* even, const bf16* odd) {
#if defined(LOCKSTEP_AVX512)
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
  return {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)))};
#else
  pair words[16];
  for (int i = 0; i < 16; i++) words[i] = {even[i], odd[i]};
  return F16::load_words(words);
#endif
}

#if defined(LOCKSTEP_AVX512) && (defined(__AVX512BF16__) || defined(LOCKSTEP_EMULATE_AVX512))

struct P16 {
  __m512i v;
  static P16 load(const pair* p) { return {_mm512_loadu_si512(p)}; }
  static P16 load(const single* p) { return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))}; }
  // The pair that a word of 32 bits holds, sixteen times.
  static P16 all(float word) { return {_mm512_castps_si512(_mm512_set1_ps(word))}; }
};

#if defined(LOCKSTEP_EMULATE_AVX512)

EMULATION F16 fma(const P16& a, const P16& b, const F16& c) {
  alignas(64) uint32_t left[16], right[16];
  alignas(64) float sums[16];
  _mm512_storeu_si512(left, a.v);
  _mm512_storeu_si512(right, b.v);
  c.store(sums);
  const uint32_t flushing = 0x9fc0;  // MXCSR: zeros for subnormals in and out, to nearest even, nothing trapped
  uint32_t before;
  for (int i = 0; i < 16; i += 8) {
    const __m256i x = _mm256_load_si256((const __m256i*)(left + i)), y = _mm256_load_si256((const __m256i*)(right + i));
    const __m256i odd = _mm256_set1_epi32(int(0xffff0000u));
    __m256 sum = _mm256_load_ps(sums + i);
    asm volatile(
        "vstmxcsr %1\n\tvldmxcsr %6\n\tvfmadd231ps %2, %3, %0\n\tvfmadd231ps %4, %5, %0\n\tvldmxcsr %1"
        : "+x"(sum), "=m"(before)
        : "x"(_mm256_and_si256(x, odd)), "x"(_mm256_and_si256(y, odd)), "x"(_mm256_slli_epi32(x, 16)),
          "x"(_mm256_slli_epi32(y, 16)), "m"(flushing));
    _mm256_store_ps(sums + i, sum);
  }
  return F16::load(sums);
}

#else

inline F16 fma(P16 a, P16 b, F16 c) { return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)}; }

#endif

#else

struct P16 {
  uint32_t words[16];
  static P16 load(const pair* p) {
    P16 r;
    std::memcpy(r.words, p, sizeof(r.words));
    return r;
  }
  static P16 load(const single* p) {
    P16 r;
    for (int i = 0; i < 16; i++) r.words[i] = p[i].even.bits;
    return r;
  }
  static P16 all(float word) {
    uint32_t bits;
    std::memcpy(&bits, &word, 4);
    P16 r;
    for (int i = 0; i < 16; i++) r.words[i] = bits;
    return r;
  }
  F16 even() const {
    uint32_t t[16];
    for (int i = 0; i < 16; i++) t[i] = words[i] << 16;
    return F16::load_words(t);
  }
  F16 odd() const {
    uint32_t t[16];
    for (int i = 0; i < 16; i++) t[i] = words[i] & 0xffff0000u;
    return F16::load_words(t);
  }
};

// y where x is at least `least` in magnitude, or NaN, else a zero of y's sign.
inline F16 flushed(F16 x, float least, F16 y) {
  return where_less(max(x, F16::zero() - x), F16::all(least), y * F16::zero(), y);
}
inline F16 flushed(F16 x) { return flushed(x, 0x1p-126f, x); }

// Inputs are flushed already. Times 2^64 the result rounds as with an exponent of any size; where that overflows, the
// result is 0 or not small.
inline F16 flushing_fma(F16 a, F16 b, F16 c) {
  const F16 scale = F16::all(0x1p64f);
  return flushed(fma(a * scale, b, c * scale), 0x1p-62f, fma(a, b, c));
}

EMULATION F16 fma(const P16& a, const P16& b, const F16& c) {
  const F16 t = flushing_fma(flushed(a.odd()), flushed(b.odd()), flushed(c));
  return flushing_fma(flushed(a.even()), flushed(b.even()), t);
}

#endif

inline P16 load_split(const pair* p) { return P16::load(p); }
inline P16 load_split(const single* p) { return P16::load(p); }

}  // namespace lockstep
