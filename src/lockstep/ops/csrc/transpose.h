// A 16 x 16 block of float32, its rows and columns exchanged: a copy, so the same in every build.
#pragma once

#include "vec16.h"

namespace lockstep {

#if defined(__AVX2__) && defined(__FMA__)

// Eight rows of eight from `from` on, transposed to `to`; both have rows of sixteen.
inline void transpose8(const float* from, float* to) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from + 16 * i);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // r[i + c]: column c, and c + 4 in its upper half, of four rows
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int c = 0; c < 4; c++) {
    _mm256_storeu_ps(to + 16 * c, _mm256_permute2f128_ps(r[c], r[c + 4], 0x20));
    _mm256_storeu_ps(to + 16 * (c + 4), _mm256_permute2f128_ps(r[c], r[c + 4], 0x31));
  }
}
inline void transpose16(const float* from, float* to) {
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 16; j += 8) transpose8(from + 16 * i + j, to + 16 * j + i);
}

#else

inline void transpose8(const float* from, float* to) {
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) to[16 * j + i] = from[16 * i + j];
}
inline void transpose16(const float* from, float* to) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[16 * j + i] = from[16 * i + j];
}

#endif

}  // namespace lockstep
