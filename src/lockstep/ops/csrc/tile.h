// The micro-kernel: a few rows times a few panels of sixteen columns, accumulators in registers.
//
// c(i, j) = fma(a(i, p), b(p, j), c(i, j)) for p = 0, 1, ..., depth - 1 in this order; that is all it promises
// and all that the products and attention build on. b(p, j) and a(i, p) are numbers, or pairs of them (pairs16.h), of
// which a word of `a` holds one.
#pragma once

#include "vec16.h"

namespace lockstep {

// Widest tile whose accumulators fit the registers: 16 of 8 lanes with AVX2, 32 of 16 lanes with AVX-512.
constexpr int TILE_ROWS = 6;
#if defined(LOCKSTEP_AVX512)
constexpr int tile_panels(int rows) { return rows <= 2 ? 8 : 4; }
// Copied into the loops around it GCC runs out of general registers: strides and the counter go to the stack.
#define TILE __attribute__((noinline)) inline
#else
constexpr int tile_panels(int rows) { return rows <= 2 ? 2 : 1; }
#define TILE inline
#endif

// The height of the next tile where so many rows are left: none is low, where that can be, since fewer sums than the
// processor has in flight leave it waiting for them.
constexpr int64_t tile_height(int64_t left) {
  if (left == 7 || left == 8) return 4;
  if (left == 9 || left == 10 || left == 13) return 5;
  return left < TILE_ROWS ? left : TILE_ROWS;
}
constexpr int64_t tile_count(int64_t rows) {
  int64_t count = 0;
  for (; rows > 0; rows -= tile_height(rows)) count++;
  return count;
}

// What is read soon, fetched into the cache while a tile computes: with every step of k, `step` elements further.
template <typename T>
struct Ahead {
  const T* from;
  int64_t step;
  void fetch() {
    __builtin_prefetch(from);
    from += step;
  }
  Ahead after(int64_t elements) const { return {from + elements, step}; }
};
struct Nothing {
  void fetch() {}
  Nothing after(int64_t) const { return {}; }
};

// FRESH: the chains start from 0 and not from what c holds.
template <int R, int P, bool FRESH, typename T, typename A>
TILE void tile(int64_t depth, const float* a, int64_t row_stride, int64_t k_stride, const T* b, int64_t b_stride,
               int64_t panel_stride, float* c, int64_t ldc, A ahead) {
  using Lanes = decltype(load_split(b));
  F16 acc[R][P];
#pragma GCC unroll 6
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) acc[i][j] = FRESH ? F16::zero() : split<T>(F16::load(c + i * ldc + j * 16));
  for (int64_t p = 0; p < depth; p++) {
    Lanes right[P];
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) right[j] = load_split(b + j * panel_stride);
    ahead.fetch();
#pragma GCC unroll 6
    for (int i = 0; i < R; i++) {
      const Lanes left = Lanes::all(a[i * row_stride]);
#pragma GCC unroll 8
      for (int j = 0; j < P; j++) acc[i][j] = fma(left, right[j], acc[i][j]);
    }
    a += k_stride;
    b += b_stride;
  }
#pragma GCC unroll 6
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) joined<T>(acc[i][j]).store(c + i * ldc + j * 16);
}

// All panels of R rows: as many at a time as the registers hold, then one by one.
template <int R, bool FRESH, typename T, typename A>
inline void row_tiles(int64_t depth, int64_t panels, const float* a, int64_t row_stride, int64_t k_stride, const T* b,
                      int64_t b_stride, int64_t panel_stride, float* c, int64_t ldc, A ahead) {
  constexpr int P = tile_panels(R);
  int64_t j = 0;
  for (; j + P <= panels; j += P)
    tile<R, P, FRESH>(depth, a, row_stride, k_stride, b + j * panel_stride, b_stride, panel_stride, c + j * 16, ldc,
                      ahead.after(j * panel_stride));
  for (; j < panels; j++)
    tile<R, 1, FRESH>(depth, a, row_stride, k_stride, b + j * panel_stride, b_stride, panel_stride, c + j * 16, ldc,
                      ahead.after(j * panel_stride));
}

template <bool FRESH = false, typename T, typename A = Nothing>
inline void some_rows(int64_t rows, int64_t depth, int64_t panels, const float* a, int64_t row_stride, int64_t k_stride,
                      const T* b, int64_t b_stride, int64_t panel_stride, float* c, int64_t ldc, A ahead = {}) {
  switch (rows) {
    case 1: return row_tiles<1, FRESH>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc, ahead);
    case 2: return row_tiles<2, FRESH>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc, ahead);
    case 3: return row_tiles<3, FRESH>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc, ahead);
    case 4: return row_tiles<4, FRESH>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc, ahead);
    case 5: return row_tiles<5, FRESH>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc, ahead);
    case 6: return row_tiles<6, FRESH>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc, ahead);
  }
}

// c[rows, panels * 16] of operands that lie in the caches already: panels outermost, nothing fetched ahead.
template <bool FRESH = false, typename T>
inline void block_product(int64_t depth, int64_t rows, int64_t panels, const float* a, int64_t row_stride,
                          int64_t k_stride, const T* b, int64_t b_stride, int64_t panel_stride, float* c, int64_t ldc) {
  const int64_t step = rows <= TILE_ROWS ? panels : tile_panels(TILE_ROWS);
  for (int64_t j = 0; j < panels; j += step)
    for (int64_t i = 0, height; i < rows; i += height) {
      height = tile_height(rows - i);
      some_rows<FRESH>(height, depth, panels - j < step ? panels - j : step, a + i * row_stride, row_stride, k_stride,
                       b + j * panel_stride, b_stride, panel_stride, c + i * ldc + j * 16, ldc);
    }
}

}  // namespace lockstep
