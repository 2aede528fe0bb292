// The walk over a product's blocks, shared by every product whatever is done with its sums.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>

#include "kernels.h"
#include "left.h"
#include "steps.h"
#include "team.h"
#include "tile.h"
#if defined(LOCKSTEP_BF16_TILES)
#include "tiles.h"
#endif

namespace lockstep {

constexpr int64_t TASK_COLUMNS = 1024;  // columns of a task, of all sides: its left-hand side is copied once for them all
constexpr int64_t HELD = 1 << 16;      // words of a left-hand side at most that a thread keeps for all its tasks
// k of a block at most: the panels of a tile and a tile's rows of it stay in the first-level cache; TASK_ROWS x DEPTH
// words in the second-level one. By tiles the sums go to memory after every block, for a block is read that is longer.
#if defined(LOCKSTEP_BF16_TILES)
template <typename T>
constexpr int64_t DEPTH = sizeof(T) == 2 ? 512 : 96;
#elif defined(LOCKSTEP_AVX512)
template <typename T>
constexpr int64_t DEPTH = sizeof(T) == 2 ? 192 : 96;
#else
template <typename T>
constexpr int64_t DEPTH = sizeof(T) == 2 ? 320 : 192;
#endif

// Bytes of a panel that are under way while one tile takes all rows: what memory delivers in the time it takes to answer.
constexpr int64_t UNDER_WAY = 1024;

// c[rows, panels * 16] += a x b over `depth` steps from step `from` of the left-hand side on; a in tiles `stride` apart,
// panels of b in rows of sixteen. Panels outermost (each stays in the first-level cache over all rows); the next ones
// are fetched meanwhile, a part with every tile.
template <typename R>
inline void multiply(int64_t from, int64_t depth, int64_t rows, int64_t panels, const float* a, int64_t stride,
                     const R* b, int64_t panel_stride, float* c, int64_t ldc) {
  if (rows <= TILE_ROWS)
    return some_rows(rows, depth, panels, a + from * rows, 1, rows, b, PANEL, panel_stride, c, ldc,
                     Ahead<R>{b + UNDER_WAY / sizeof(R), PANEL});
  constexpr int P = tile_panels(TILE_ROWS);
  const int64_t step = P * PANEL / tile_count(rows);
  for (int64_t j = 0; j < panels; j += P) {
    Ahead<R> next{b + (j + P) * panel_stride, step};
    for (int64_t i = 0, height; i < rows; i += height) {
      height = tile_height(rows - i);
      some_rows(height, depth, panels - j < P ? panels - j : P, a + i * stride + from * height, 1, height,
                b + j * panel_stride, PANEL, panel_stride, c + i * ldc + j * 16, ldc, next);
      next = next.after(depth * step);
    }
  }
}

// The same for a block of `depth` k, as the operands' type takes them.
template <typename T>
inline void multiply_block(Unit<T>& unit, int64_t depth, int64_t rows, int64_t panels, const float* a, const T* b,
                           int64_t panel_stride, float* c, int64_t ldc) {
  const int64_t stride = left_stride<T>(depth), pairs = depth / 2;
  if constexpr (BY_TILES<T>) {
    multiply_tiles(unit, depth, rows, panels, a, b, panel_stride, c, ldc);
  } else if constexpr (BY_PAIRS<T>) {
    multiply(0, pairs, rows, panels, a, stride, (const pair*)b, panel_stride / 2, c, ldc);
    if (depth % 2)
      multiply(pairs, 1, rows, panels, a, stride, (const single*)(b + 2 * pairs * PANEL), panel_stride, c, ldc);
  } else {
    multiply(0, depth, rows, panels, a, stride, b, panel_stride, c, ldc);
  }
}

// A right-hand side of n columns: SIDES packed matrices whose sums are wanted together.
template <typename T, int SIDES>
struct Right {
  const T* sides[SIDES];
  int64_t n;
};

// A block of the result of right-hand side `part`: rows i0 .., columns j0 .., whose sums lie in rows of `width` floats;
// those of each of its sides lie `side` floats after the last one's.
struct ProductTask {
  int64_t i0, j0, rows, columns, width, side, part;
};

// The chains start from 0.
inline void from_zero(const ProductTask& t, float* c) { std::fill(c, c + t.rows * t.width, 0.0f); }

// How a product is cut into tasks of rows and panels, and blocks of k. No chain depends on it.
template <typename T>
struct Cut {
  int64_t rows, row_tasks, panels, column_tasks, depth, blocks;
  int64_t block;  // words of a block of a task's left-hand side
  bool held;  // every thread copies the left-hand side once, for all its tasks

  Cut(int64_t m, int64_t all_panels, int64_t k, bool in_rows, int64_t sides, int64_t threads) {
    rows = std::min(m, TASK_ROWS);
    row_tasks = (m + TASK_ROWS - 1) / TASK_ROWS;
    panels = all_panels;
    const int64_t widest = TASK_COLUMNS / PANEL / sides;
    column_tasks = std::max<int64_t>(1, (panels + widest - 1) / widest);
    if (row_tasks > 0 && row_tasks < 4 * threads)  // narrower ones, so that every thread has some and all end together
      column_tasks = std::max(column_tasks, std::min(4 * threads / row_tasks, panels / 2));
    if (row_tasks == 1 && column_tasks < panels)
      column_tasks = std::min((column_tasks + threads - 1) / threads * threads, panels);
    // Blocks alike, of whole tiles; a single one where every panel is read once.
    const int64_t at_once = BY_TILES<T> ? 32 : TILE_ROWS, whole = BY_TILES<T> ? 32 : 16;
    blocks = in_rows && m <= at_once ? 1 : std::max<int64_t>(1, (k + DEPTH<T> - 1) / DEPTH<T>);
    depth = (k + blocks - 1) / blocks;
    depth = (depth + whole - 1) / whole * whole;
    block = rows * left_stride<T>(depth);
    held = in_rows && row_tasks == 1 && (blocks == 1 || blocks * block <= HELD);
  }
  int64_t first_panel(int64_t task) const { return task * panels / column_tasks; }
  int64_t width() const { return (panels + column_tasks - 1) / column_tasks * PANEL; }
  int64_t left() const { return held ? blocks * block : block; }
};

// Where vectors of 64 bytes lie in one line of memory each, fifteen words behind `p` at most.
inline float* in_lines(const std::unique_ptr<float[]>& p) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p.get()) + 63) / 64 * 64);
}

// a [m, k] times some right-hand sides, as if their columns stood side by side. begin(task, c) fills the starting values
// of a block's sums, finish(task, c) takes the sums.
template <typename T, int SIDES, typename Begin, typename Finish>
void product(const T* a, int64_t row_stride, int64_t k_stride, std::span<const Right<T, SIDES>> parts, int64_t m,
             int64_t k, Begin begin, Finish finish) {
  int64_t all = 0;
  for (const auto& part : parts) all += panels(part.n);
  const Cut<T> cut(m, all, k, k_stride == 1, SIDES, threads());
  const int64_t width = cut.width(), side = cut.rows * width;
  const bool worth = SIDES * m * all * PANEL * k > 8 * GRAIN;
  in_team(cut.row_tasks * cut.column_tasks, worth, [&](Tasks& tasks) {
    int64_t task = tasks.take();
    if (task < 0) return;
    // Not vectors: a product of one row would spend longer on zeroing them than on its sums.
    const std::unique_ptr<float[]> words(new float[cut.left() + 15]), floats(new float[SIDES * side + 15]);
    float *const left = in_lines(words), *const c = in_lines(floats);
    Unit<T> unit;
    auto copy = [&](int64_t i0, int64_t rows, int64_t p0, float* to) {
      copy_left(a + i0 * row_stride + p0 * k_stride, row_stride, k_stride, rows, std::min(cut.depth, k - p0), to);
    };
    if (cut.held)
      for (int64_t i = 0; i < cut.blocks; i++) copy(0, m, i * cut.depth, left + i * cut.block);
    auto run = [&](const Right<T, SIDES>& right, const ProductTask& t) {
      for (int s = 0; s < SIDES; s++) begin(t, c + s * side);
      for (int64_t i = 0; i < cut.blocks; i++) {
        const int64_t p0 = i * cut.depth, depth = std::min(cut.depth, k - p0);
        if (!cut.held) copy(t.i0, t.rows, p0, left);
        for (int s = 0; s < SIDES; s++)
          multiply_block(unit, depth, t.rows, panels(t.columns), left + (cut.held ? i * cut.block : 0),
                         right.sides[s] + (t.j0 / PANEL * k + p0) * PANEL, k * PANEL, c + s * side, width);
      }
      finish(t, c);
    };
    for (; task >= 0; task = tasks.take()) {
      const int64_t i0 = task / cut.column_tasks * cut.rows, rows = std::min(cut.rows, m - i0);
      const int64_t column = task % cut.column_tasks;
      int64_t first = cut.first_panel(column), last = cut.first_panel(column + 1);  // of the parts' panels in one row
      for (size_t part = 0; part < parts.size(); part++) {
        const int64_t n = parts[part].n, count = panels(n), j0 = std::max<int64_t>(0, first) * PANEL;
        const int64_t j1 = std::min(n, last * PANEL);
        if (j0 < j1) run(parts[part], {i0, j0, rows, j1 - j0, width, side, int64_t(part)});
        first -= count;
        last -= count;
      }
    }
  });
}

// One right-hand side.
template <typename T, int SIDES, typename Begin, typename Finish>
void product(const T* a, int64_t row_stride, int64_t k_stride, const Right<T, SIDES>& right, int64_t m, int64_t k,
             Begin begin, Finish finish) {
  product<T, SIDES>(a, row_stride, k_stride, std::span(&right, 1), m, k, begin, finish);
}

}  // namespace lockstep
