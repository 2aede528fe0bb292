// The micro-kernel: a few rows times a few panels of sixteen columns, accumulators in registers.
//
// c(i, j) = fma(a(i, p), b(p, j), c(i, j)) for p = 0, 1, ..., depth - 1 in this order; that is all it promises
// and all that the products and attention build on.
#pragma once

#include "vec16.h"

namespace lockstep {

// Widest tile whose accumulators fit the registers: 16 of 8 lanes with AVX2, 32 of 16 lanes with AVX-512.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;
constexpr int tile_panels(int) { return 4; }
#else
constexpr int TILE_ROWS = 6;
constexpr int tile_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

template <int R, int P, typename T>
inline void tile(int64_t depth, const float* a, int64_t row_stride, int64_t k_stride, const T* b, int64_t b_stride,
                 int64_t panel_stride, float* c, int64_t ldc) {
  F16 acc[R][P];
#pragma GCC unroll 6
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < P; j++) acc[i][j] = F16::load(c + i * ldc + j * 16);
  for (int64_t p = 0; p < depth; p++) {
    F16 right[P];
#pragma GCC unroll 4
    for (int j = 0; j < P; j++) right[j] = F16::load(b + j * panel_stride);
#pragma GCC unroll 6
    for (int i = 0; i < R; i++) {
      F16 left = F16::all(a[i * row_stride]);
#pragma GCC unroll 4
      for (int j = 0; j < P; j++) acc[i][j] = fma(left, right[j], acc[i][j]);
    }
    a += k_stride;
    b += b_stride;
  }
#pragma GCC unroll 6
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < P; j++) acc[i][j].store(c + i * ldc + j * 16);
}

// All panels of R rows: as many at a time as the registers hold, then one by one.
template <int R, typename T>
inline void row_tiles(int64_t depth, int64_t panels, const float* a, int64_t row_stride, int64_t k_stride, const T* b,
                      int64_t b_stride, int64_t panel_stride, float* c, int64_t ldc) {
  constexpr int P = tile_panels(R);
  int64_t j = 0;
  for (; j + P <= panels; j += P)
    tile<R, P>(depth, a, row_stride, k_stride, b + j * panel_stride, b_stride, panel_stride, c + j * 16, ldc);
  for (; j < panels; j++)
    tile<R, 1>(depth, a, row_stride, k_stride, b + j * panel_stride, b_stride, panel_stride, c + j * 16, ldc);
}

template <typename T>
inline void some_rows(int64_t rows, int64_t depth, int64_t panels, const float* a, int64_t row_stride, int64_t k_stride,
                      const T* b, int64_t b_stride, int64_t panel_stride, float* c, int64_t ldc) {
  switch (rows) {
    case 1: return row_tiles<1>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc);
    case 2: return row_tiles<2>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc);
    case 3: return row_tiles<3>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc);
    case 4: return row_tiles<4>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc);
    case 5: return row_tiles<5>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc);
    case 6: return row_tiles<6>(depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc);
  }
}

// Steps of k whose sixteen values fill a cache line of 64 bytes.
template <typename T>
constexpr int64_t LINE = 4 / sizeof(T);

// c[rows, panels * 16] += a x b. Panels outermost (each stays in the first-level cache over all rows); the next panel is
// fetched meanwhile, a part with every tile.
template <typename T>
inline void multiply(int64_t depth, int64_t rows, int64_t panels, const float* a, int64_t row_stride, int64_t k_stride,
                     const T* b, int64_t b_stride, int64_t panel_stride, float* c, int64_t ldc) {
  if (rows <= TILE_ROWS)
    return some_rows(rows, depth, panels, a, row_stride, k_stride, b, b_stride, panel_stride, c, ldc);
  constexpr int P = tile_panels(TILE_ROWS);
  for (int64_t j = 0; j < panels; j += P) {
    int64_t used = panels - j < P ? panels - j : P;
    const int64_t ahead = j + P < panels ? (depth * TILE_ROWS + rows - 1) / rows : 0;  // steps of k fetched with a tile
    for (int64_t i = 0; i < rows; i += TILE_ROWS) {
      const T* next = b + (j + P) * panel_stride + i / TILE_ROWS * ahead * b_stride;
      for (int64_t p = 0; p < ahead; p += LINE<T>) __builtin_prefetch(next + p * b_stride);
      some_rows(rows - i < TILE_ROWS ? rows - i : TILE_ROWS, depth, used, a + i * row_stride, row_stride, k_stride,
                b + j * panel_stride, b_stride, panel_stride, c + i * ldc + j * 16, ldc);
    }
  }
}

}  // namespace lockstep
