// The left-hand side of a product, a block of its rows and k at a time, as words (steps.h) in the order in which the
// micro-kernel reads them: one stream of memory.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "steps.h"
#include "tile.h"
#include "transpose.h"

namespace lockstep {

// Rows of a block at most, whole passes of tiles: so few that their words and their sums of TASK_COLUMNS columns
// (product.h) stay in a second-level cache.
#if defined(LOCKSTEP_BF16_TILES)
constexpr int64_t TASK_ROWS = 96;
#else
constexpr int64_t TASK_ROWS = 48;
#endif

// Of each tile of the micro-kernel [steps][height]. Eight words are stored where a step of k has `height`, each over the
// end of the one before: so a gap behind each tile.
//
// Of a product by tiles (tiles.h) each sixteen rows are [k / 32][rows][16], zeros behind the last k: 32 k of a row are a
// row of a tile register.
constexpr int64_t SPILL = 8;

// Words of a row. The tile whose first row is i begins at i times that.
template <typename T>
constexpr int64_t left_stride(int64_t depth) {
  return BY_TILES<T> ? (depth + 31) / 32 * 16 : steps<T>(depth) + SPILL;
}

// The first `height` of eight words, and something behind them.
inline void store_over(const float* from, float* to) { std::memcpy(to, from, SPILL * sizeof(float)); }

// From rows of contiguous k: sixteen steps of k of a tile at a time, turned.
template <typename T>
void copy_rows(const T* a, int64_t row_stride, int64_t rows, int64_t depth, float* tiles) {
  const int64_t count = steps<T>(depth), stride = left_stride<T>(depth);
  alignas(64) float square[SPILL * 16] = {}, turned[256];
  for (int64_t i = 0, height; i < rows; i += height) {
    height = tile_height(rows - i);
    float* tile = tiles + i * stride;
    auto words = [&](int64_t row, int64_t p) {
      return words_along<T>(a + row * row_stride + p * STEP<T>, depth - p * STEP<T>);
    };
    if (height == 1) {
      for (int64_t p = 0; p < count; p += 16) store_part(words(i, p), tile + p, count - p);
      continue;
    }
    for (int64_t p = 0; p < count; p += 16) {
      for (int64_t r = 0; r < height; r++) words(i + r, p).store(square + 16 * r);
      transpose8(square, turned);
      transpose8(square + 8, turned + 128);
      for (int64_t q = p; q < std::min(p + 16, count); q++) store_over(turned + 16 * (q - p), tile + q * height);
    }
  }
}

// From contiguous rows at every k: sixteen steps of k at a time, dealt out to the tiles. They lie far apart in memory:
// those of the next steps are fetched meanwhile.
template <typename T>
void copy_columns(const T* a, int64_t k_stride, int64_t rows, int64_t depth, float* tiles) {
  constexpr int64_t STEPS = 16, WIDTH = TASK_ROWS + SPILL;
  const int64_t count = steps<T>(depth), stride = left_stride<T>(depth);
  alignas(64) float wide[STEPS * WIDTH] = {};
  for (int64_t first = 0; first < count; first += STEPS) {
    const int64_t last = std::min(first + STEPS, count);
    for (int64_t p = first; p < last; p++)
      for (int64_t i = 0; i < rows; i += 16) {
        const T* from = a + p * STEP<T> * k_stride + i;
        for (int64_t s = 0; s < STEP<T>; s++) __builtin_prefetch(from + (STEPS * STEP<T> + s) * k_stride);
        const F16 words = words_across<T>(from, k_stride, depth - p * STEP<T>, rows - i);
        store_part(words, wide + (p - first) * WIDTH + i, rows - i);
      }
    for (int64_t i = 0, height; i < rows; i += height) {
      height = tile_height(rows - i);
      float* tile = tiles + i * stride;
      for (int64_t p = first; p < last; p++) store_over(wide + (p - first) * WIDTH + i, tile + p * height);
    }
  }
}

// The same for a product by tiles: from rows, a row of a tile register at a time,
template <typename T>
void copy_tile_rows(const T* a, int64_t row_stride, int64_t rows, int64_t depth, float* tiles) {
  for (int64_t i = 0; i < rows; i++) {
    const int64_t in_tile = i % 16, height = std::min<int64_t>(16, rows - i + in_tile);
    float* to = tiles + (i - in_tile) * left_stride<T>(depth) + in_tile * 16;
    for (int64_t p = 0; p < depth; p += 32, to += height * 16)
      words_along<T>(a + i * row_stride + p, depth - p).store_words(to);
  }
}

// and from rows that are neighbours at every k, a tile of 32 k at a time, turned.
template <typename T>
void copy_tile_columns(const T* a, int64_t k_stride, int64_t rows, int64_t depth, float* tiles) {
  alignas(64) float block[256], turned[256];
  for (int64_t p = 0; p < depth; p += 32)
    for (int64_t i = 0; i < rows; i += 16) {
      const int64_t height = std::min<int64_t>(16, rows - i);
      for (int64_t q = 0; q < 16; q++) {
        const int64_t left = depth - p - 2 * q;
        const T* from = a + (p + 2 * q) * k_stride + i;
        for (int64_t s = 0; s < 2; s++) __builtin_prefetch(from + (32 + s) * k_stride);
        (left > 0 ? words_across<T>(from, k_stride, left, height) : F16::zero()).store_words(block + 16 * q);
      }
      transpose16(block, turned);
      float* to = tiles + i * left_stride<T>(depth) + p / 2 * height;
      for (int64_t r = 0; r < height; r++) F16::load_words(turned + 16 * r).store_words(to + 16 * r);
    }
}

template <typename T>
void copy_left(const T* a, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth, float* tiles) {
  if constexpr (BY_TILES<T>)
    k_stride == 1 ? copy_tile_rows(a, row_stride, rows, depth, tiles)
                  : copy_tile_columns(a, k_stride, rows, depth, tiles);
  else
    k_stride == 1 ? copy_rows(a, row_stride, rows, depth, tiles) : copy_columns(a, k_stride, rows, depth, tiles);
}

}  // namespace lockstep
