// Products of bfloat16 by tiles, as AMX's tdpbf16ps makes them: the device class cpu-amx-bf16 (LOCKSTEP_BF16_TILES).
//
// The contract: k is cut into tiles of 32, from the first k of the product on, the last one filled up with zeros. Of
// each, in ascending order, an element of the result takes
//
//   even = odd = 0;  even = a(2p) * b(2p) + even,  odd = a(2p + 1) * b(2p + 1) + odd,  p = 0, 1, .. 15
//   sum = sum + (even + odd)
//
// Each multiply-add rounds once, to nearest even, and so does each of the two additions. Inputs below 2^-126 in magnitude
// are zeros of their sign, and so are results which, rounded to 24 bits of whatever exponent, are below it. The
// processor's modes of rounding and of flushing play no part. That is the instruction as Intel documents it; which NaN
// comes out of several is left open. A row's sums know of no other row, so how many rows a tile has changes no bit.
//
// A sum that goes on from an earlier one begins with tiles of its own: in one piece it is the same where the earlier one
// ended with a whole tile.
#pragma once

#include "left.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#else
#include "emulate_tiles.h"
#endif

namespace lockstep {

constexpr int64_t TILE_K = 32, TILE_HEIGHT = 16;
constexpr int64_t PASS_ROWS = 2 * TILE_HEIGHT;  // rows and panels of a pass over k: four tiles of sums, in registers
constexpr int64_t PASS_PANELS = 2;

// The tile registers of a thread: 0 to 3 sums, 4 and 5 rows of the left-hand side, 6 and 7 panels of the right-hand one.
// Other libraries configure them too, so a thread does it anew when it begins with a product's tasks, and lets go of
// them when it ends: a thread that sleeps has no tiles to be saved.
template <>
class Unit<bf16> {
 public:
  Unit() = default;
  Unit(const Unit&) = delete;
  ~Unit() {
    if (upper_ > 0) _tile_release();
  }

  // For so many rows of sums, in an upper tile and, if there are as many, a lower one. Sums are lost.
  void shape(int64_t rows) {
    const int64_t upper = std::min(rows, TILE_HEIGHT), lower = rows - upper;
    if (upper == upper_ && lower == lower_) return;
    upper_ = upper, lower_ = lower;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(config) == 64);
    const int64_t heights[8] = {upper, upper, lower, lower, upper, lower, TILE_K / 2, TILE_K / 2};
    for (int n = 0; n < 8; n++) {
      config.rows[n] = uint8_t(heights[n]);
      config.bytes[n] = heights[n] > 0 ? 64 : 0;
    }
    asm volatile("" ::"r"(&config) : "memory");  // as in dot_tiles
    _tile_loadconfig(&config);
  }

 private:
  int64_t upper_ = 0, lower_ = 0;
};

// Tiles of the left-hand side: those of the upper rows, and of the lower ones; words from one tile of k to the next.
struct LeftTiles {
  const float *upper, *lower;
  int64_t upper_step, lower_step;
};

// Sums of up to 32 rows (LOWER: more than sixteen) and one or two panels, over so many tiles of k. What was written must
// lie in memory before: GCC does not know that tile instructions read it.
template <bool LOWER, bool SECOND>
TILE void dot_tiles(int64_t count, LeftTiles a, const bf16* b, int64_t panel_stride, float* c, int64_t ldc) {
  constexpr int64_t AHEAD = 1024 / sizeof(bf16);  // what is under way meanwhile, of each panel
  const int64_t row = ldc * int64_t(sizeof(float));
  float* const lower = c + TILE_HEIGHT * ldc;
  const bf16* other = b + panel_stride;
  asm volatile("" : "+r"(other)::"memory");  // a pointer of its own, or GCC runs out of general registers
  _tile_loadd(0, c, row);
  if constexpr (SECOND) _tile_loadd(1, c + PANEL, row);
  if constexpr (LOWER) _tile_loadd(2, lower, row);
  if constexpr (LOWER && SECOND) _tile_loadd(3, lower + PANEL, row);
  for (; count > 0; count--) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < TILE_K * PANEL; line += 32) {
      __builtin_prefetch(b + AHEAD + line);
      if constexpr (SECOND) __builtin_prefetch(other + AHEAD + line);
    }
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a.upper, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (SECOND) _tile_loadd(7, other, 64);
    if constexpr (SECOND) _tile_dpbf16ps(1, 4, 7);
    if constexpr (LOWER) _tile_loadd(5, a.lower, 64);
    if constexpr (LOWER) _tile_dpbf16ps(2, 5, 6);
    if constexpr (LOWER && SECOND) _tile_dpbf16ps(3, 5, 7);
    a.upper += a.upper_step;
    a.lower += a.lower_step;
    b += TILE_K * PANEL;
    other += TILE_K * PANEL;
  }
  _tile_stored(0, c, row);
  if constexpr (SECOND) _tile_stored(1, c + PANEL, row);
  if constexpr (LOWER) _tile_stored(2, lower, row);
  if constexpr (LOWER && SECOND) _tile_stored(3, lower + PANEL, row);
}

// The last k of a panel, fewer than 32, as a tile: zeros behind them.
inline void last_tile(const bf16* b, int64_t depth, bf16* tile) {
  std::fill_n(tile, TILE_K * PANEL, bf16{});
  std::copy_n(b, depth / 2 * 2 * PANEL, tile);
  if (depth % 2)  // singles (pairs16.h): the even elements alone
    for (int64_t j = 0; j < PANEL; j++) tile[(depth - 1) * PANEL + 2 * j] = b[(depth - 1) * PANEL + j];
}

// The rows of one pass from row i on, in all panels, panels outermost.
inline void pass_tiles(int64_t i, int64_t rows, int64_t depth, int64_t panels, const float* a, const bf16* b,
                       int64_t panel_stride, float* c, int64_t ldc) {
  const int64_t whole = depth / TILE_K, rest = depth % TILE_K, stride = left_stride<bf16>(depth);
  const int64_t upper = std::min(rows, TILE_HEIGHT), words = TILE_K / 2;
  const LeftTiles left{a + i * stride, a + (i + upper) * stride, upper * words, (rows - upper) * words};
  const LeftTiles last{left.upper + whole * left.upper_step, left.lower + whole * left.lower_step, 0, 0};
  auto* dot = rows > TILE_HEIGHT ? dot_tiles<true, true> : dot_tiles<false, true>;
  alignas(64) bf16 ends[PASS_PANELS][TILE_K * PANEL];
  for (int64_t j = 0; j < panels; j += PASS_PANELS) {
    if (panels - j < PASS_PANELS) dot = rows > TILE_HEIGHT ? dot_tiles<true, false> : dot_tiles<false, false>;
    float* const sums = c + i * ldc + j * PANEL;
    if (whole > 0) dot(whole, left, b + j * panel_stride, panel_stride, sums, ldc);
    if (rest == 0) continue;
    for (int64_t p = 0; p < std::min(PASS_PANELS, panels - j); p++)
      last_tile(b + (j + p) * panel_stride + whole * TILE_K * PANEL, rest, ends[p]);
    dot(1, last, ends[0], TILE_K * PANEL, sums, ldc);
  }
}

// c[rows, panels * 16] += a x b over a block of `depth` k, which begins with a tile; panels in steps of two k.
inline void multiply_tiles(Unit<bf16>& unit, int64_t depth, int64_t rows, int64_t panels, const float* a,
                           const bf16* b, int64_t panel_stride, float* c, int64_t ldc) {
  for (int64_t i = 0; i < rows; i += PASS_ROWS) {
    const int64_t height = std::min(PASS_ROWS, rows - i);
    unit.shape(height);
    pass_tiles(i, height, depth, panels, a, b, panel_stride, c, ldc);
  }
}

}  // namespace lockstep
