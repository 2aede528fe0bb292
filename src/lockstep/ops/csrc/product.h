// The walk over a product's blocks, shared by every product whatever is done with its sums.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>

#include "kernels.h"
#include "steps.h"
#include "team.h"
#include "tile.h"
#include "transpose.h"

namespace lockstep {

constexpr int64_t TASK_ROWS = 96;      // rows of a task (a multiple of every tile height)
constexpr int64_t TASK_COLUMNS = 256;  // columns of a task, of all sides
constexpr int64_t HELD = 1 << 16;      // words of a left-hand side at most that a thread keeps for all its tasks
// k of a block at most: the panels of a tile and a tile's rows of it stay in the first-level cache; TASK_ROWS x DEPTH
// words in the second-level one.
#if defined(LOCKSTEP_AVX512)
template <typename T>
constexpr int64_t DEPTH = sizeof(T) == 2 ? 192 : 96;
#else
template <typename T>
constexpr int64_t DEPTH = sizeof(T) == 2 ? 320 : 192;
#endif

// A block of the left-hand side as words, in tiles: of each tile [steps][height], so that the micro-kernel reads one
// stream of memory. The tile whose first row is i begins at i * left_stride(steps).
//
// Eight words are stored where a step of k has `height`, each over the end of the one before: so a gap behind each tile.
constexpr int64_t SPILL = 8;
inline int64_t left_stride(int64_t steps) { return steps + SPILL; }

// The first `height` of eight words, and something behind them.
inline void store_over(const float* from, float* to) { std::memcpy(to, from, SPILL * sizeof(float)); }

// From rows of contiguous k: sixteen steps of k of a tile at a time, turned.
template <typename T>
void copy_rows(const T* a, int64_t row_stride, int64_t rows, int64_t depth, float* tiles) {
  const int64_t count = steps<T>(depth);
  alignas(64) float square[SPILL * 16] = {}, turned[256];
  for (int64_t i = 0, height; i < rows; i += height) {
    height = tile_height(rows - i);
    float* tile = tiles + i * left_stride(count);
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
  const int64_t count = steps<T>(depth);
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
      float* tile = tiles + i * left_stride(count);
      for (int64_t p = first; p < last; p++) store_over(wide + (p - first) * WIDTH + i, tile + p * height);
    }
  }
}

template <typename T>
void copy_left(const T* a, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth, float* tiles) {
  k_stride == 1 ? copy_rows(a, row_stride, rows, depth, tiles) : copy_columns(a, k_stride, rows, depth, tiles);
}

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
inline void multiply_block(int64_t depth, int64_t rows, int64_t panels, const float* a, const T* b,
                           int64_t panel_stride, float* c, int64_t ldc) {
  const int64_t stride = left_stride(steps<T>(depth)), pairs = depth / 2;
  if constexpr (BY_PAIRS<T>) {
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
struct Cut {
  int64_t rows, row_tasks, panels, column_tasks, depth, blocks;
  int64_t block;  // words of a block of a task's left-hand side
  bool held;  // every thread copies the left-hand side once, for all its tasks

  // deepest, step: k of a block at most, and of a step.
  Cut(int64_t m, int64_t all_panels, int64_t k, bool in_rows, int64_t sides, int64_t deepest, int64_t step,
      int64_t threads) {
    rows = std::min(m, TASK_ROWS);
    row_tasks = (m + TASK_ROWS - 1) / TASK_ROWS;
    panels = all_panels;
    const int64_t widest = TASK_COLUMNS / PANEL / sides;
    column_tasks = std::max<int64_t>(1, (panels + widest - 1) / widest);
    if (row_tasks > 0 && row_tasks < 4 * threads)  // narrower ones, so that every thread has some and all end together
      column_tasks = std::max(column_tasks, std::min(4 * threads / row_tasks, panels / 2));
    if (row_tasks == 1 && column_tasks < panels)
      column_tasks = std::min((column_tasks + threads - 1) / threads * threads, panels);
    // Blocks alike; a single one where every panel is read once.
    blocks = in_rows && m <= TILE_ROWS ? 1 : std::max<int64_t>(1, (k + deepest - 1) / deepest);
    depth = (k + blocks - 1) / blocks;
    depth = (depth + 15) / 16 * 16;
    block = rows * left_stride(depth / step);
    held = in_rows && row_tasks == 1 && (blocks == 1 || blocks * block <= HELD);
  }
  int64_t first_panel(int64_t task) const { return task * panels / column_tasks; }
  int64_t width() const { return (panels + column_tasks - 1) / column_tasks * PANEL; }
  int64_t left() const { return held ? blocks * block : block; }
};

// a [m, k] times some right-hand sides, as if their columns stood side by side. begin(task, c) fills the starting values
// of a block's sums, finish(task, c) takes the sums.
template <typename T, int SIDES, typename Begin, typename Finish>
void product(const T* a, int64_t row_stride, int64_t k_stride, std::span<const Right<T, SIDES>> parts, int64_t m,
             int64_t k, Begin begin, Finish finish) {
  int64_t all = 0;
  for (const auto& part : parts) all += panels(part.n);
  const Cut cut(m, all, k, k_stride == 1, SIDES, DEPTH<T>, STEP<T>, threads());
  const int64_t width = cut.width(), side = cut.rows * width;
  const bool worth = SIDES * m * all * PANEL * k > 8 * GRAIN;
  in_team(cut.row_tasks * cut.column_tasks, worth, [&](Tasks& tasks) {
    int64_t task = tasks.take();
    if (task < 0) return;
    // Not vectors: a product of one row would spend longer on zeroing them than on its sums.
    const std::unique_ptr<float[]> left(new float[cut.left()]), c(new float[SIDES * side]);
    auto copy = [&](int64_t i0, int64_t rows, int64_t p0, float* to) {
      copy_left(a + i0 * row_stride + p0 * k_stride, row_stride, k_stride, rows, std::min(cut.depth, k - p0), to);
    };
    if (cut.held)
      for (int64_t i = 0; i < cut.blocks; i++) copy(0, m, i * cut.depth, left.get() + i * cut.block);
    auto run = [&](const Right<T, SIDES>& right, const ProductTask& t) {
      for (int s = 0; s < SIDES; s++) begin(t, c.get() + s * side);
      for (int64_t i = 0; i < cut.blocks; i++) {
        const int64_t p0 = i * cut.depth, depth = std::min(cut.depth, k - p0);
        if (!cut.held) copy(t.i0, t.rows, p0, left.get());
        for (int s = 0; s < SIDES; s++)
          multiply_block(depth, t.rows, panels(t.columns), left.get() + (cut.held ? i * cut.block : 0),
                         right.sides[s] + (t.j0 / PANEL * k + p0) * PANEL, k * PANEL, c.get() + s * side, width);
      }
      finish(t, c.get());
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
