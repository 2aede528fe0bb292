// AMX's tile intrinsics on a processor without them: the registers, what configures, loads and stores them, and
// tdpbf16ps (tiles.h), so that tests can run the code anywhere. What the processor would refuse throws.
#pragma once

#include <stdexcept>
#include <string>

#include "pairs16.h"

namespace lockstep {
namespace emulated {

struct Tiles {
  bool configured = false;
  int rows[8] = {}, bytes[8] = {};
  alignas(64) uint8_t data[8][16][64] = {};
};
inline thread_local Tiles tiles;

inline void must(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("emulated tiles: ") + what);
}

inline void tile_release() { tiles = {}; }

inline void tile_loadconfig(const void* from) {
  uint8_t config[64];
  std::memcpy(config, from, sizeof(config));
  must(config[0] == 1 && config[1] == 0, "a palette or a start row that is not there");
  for (int i = 2; i < 16; i++) must(config[i] == 0, "reserved bytes are not 0");
  for (int i = 0; i < 16; i++) must(i < 8 || (config[48 + i] | config[16 + 2 * i] | config[17 + 2 * i]) == 0, "nine tiles");
  tiles = {};
  tiles.configured = true;
  for (int n = 0; n < 8; n++) {
    tiles.rows[n] = config[48 + n];
    tiles.bytes[n] = config[16 + 2 * n] + 256 * config[17 + 2 * n];
    must(tiles.rows[n] <= 16 && tiles.bytes[n] <= 64, "a tile is too large");
    must((tiles.rows[n] == 0) == (tiles.bytes[n] == 0), "a tile has rows or columns, not both");
  }
}

inline void must_be(int n) {
  must(tiles.configured && tiles.rows[n] > 0 && tiles.bytes[n] % 4 == 0, "a tile is not configured");
}

inline void tile_loadd(int n, const void* from, int64_t stride) {
  must_be(n);
  std::memset(tiles.data[n], 0, sizeof(tiles.data[n]));
  for (int i = 0; i < tiles.rows[n]; i++)
    std::memcpy(tiles.data[n][i], static_cast<const uint8_t*>(from) + i * stride, tiles.bytes[n]);
}

inline void tile_stored(int n, void* to, int64_t stride) {
  must_be(n);
  for (int i = 0; i < tiles.rows[n]; i++)
    std::memcpy(static_cast<uint8_t*>(to) + i * stride, tiles.data[n][i], tiles.bytes[n]);
}

#if defined(__AVX2__) && defined(__FMA__)

// By the processor's own multiply-adds and additions, in the mode in which they flush. Called, for the compiler does not
// know of modes.
__attribute__((noipa)) inline void dot_row(int pairs, const uint32_t* a, const uint8_t (*b)[64], float* c) {
  for (int half = 0; half < 64; half += 32) {
    __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    for (int p = 0; p < pairs; p++) {
      const __m256i words = _mm256_loadu_si256((const __m256i*)(b[p] + half));
      const __m256i upper = _mm256_set1_epi32(int(0xffff0000u)), both = _mm256_set1_epi32(int(a[p]));
      even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
                             _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), even);
      odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(both, upper)),
                            _mm256_castsi256_ps(_mm256_and_si256(words, upper)), odd);
    }
    float* const sums = c + half / 4;
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), _mm256_add_ps(even, odd)));
  }
}

class Flushing {
 public:
  // Zeros for subnormals in and out, to nearest even, nothing trapped.
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~Flushing() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

#else

EMULATION void dot_row(int pairs, const uint32_t* a, const uint8_t (*b)[64], float* c) {
  F16 even = F16::zero(), odd = F16::zero();
  for (int p = 0; p < pairs; p++) {
    float word;
    std::memcpy(&word, a + p, 4);
    const P16 left = P16::all(word), right = P16::load((const pair*)b[p]);
    even = flushing_fma(flushed(left.even()), flushed(right.even()), even);
    odd = flushing_fma(flushed(left.odd()), flushed(right.odd()), odd);
  }
  flushed(flushed(F16::load(c)) + flushed(even + odd)).store(c);
}

struct Flushing {
  ~Flushing() {}
};

#endif

inline void tile_dpbf16ps(int c, int a, int b) {
  must_be(a), must_be(b), must_be(c);
  must(a != b && b != c && a != c, "an operand is another one, too");
  must(tiles.rows[c] == tiles.rows[a] && tiles.bytes[c] == tiles.bytes[b] && tiles.bytes[a] / 4 == tiles.rows[b],
       "shapes that do not fit");
  const Flushing mode;
  for (int i = 0; i < tiles.rows[c]; i++)
    dot_row(tiles.rows[b], (const uint32_t*)tiles.data[a][i], tiles.data[b], (float*)tiles.data[c][i]);
}

}  // namespace emulated
}  // namespace lockstep

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_release lockstep::emulated::tile_release
#define _tile_loadconfig lockstep::emulated::tile_loadconfig
#define _tile_loadd lockstep::emulated::tile_loadd
#define _tile_stored lockstep::emulated::tile_stored
#define _tile_dpbf16ps lockstep::emulated::tile_dpbf16ps
