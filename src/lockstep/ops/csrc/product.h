// The walk over a product's blocks, shared by every product whatever is done with its sums.
#pragma once

#include <omp.h>

#include <algorithm>
#include <memory>

#include "kernels.h"
#include "tile.h"

namespace lockstep {

constexpr int64_t TASK_ROWS = 96;      // rows of a task (a multiple of every tile height)
constexpr int64_t TASK_COLUMNS = 256;  // columns of a task: its left-hand side is copied once for all of them
// k of a block: a panel and TILE_ROWS rows of it stay in the first-level cache, even where the rows are strided;
// TASK_ROWS x DEPTH floats in the second-level one.
template <typename T>
constexpr int64_t DEPTH = sizeof(T) == 2 ? 256 : 192;

// A block of the left-hand side as float32, keeping its orientation so that copying is by contiguous runs.
struct LeftBlock {
  const float* data;
  int64_t row_stride, k_stride;
};

template <typename T>
LeftBlock copy_left(const T* a, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth, float* buffer) {
  if (k_stride == 1) {
    const int64_t ld = DEPTH<T> + 16;  // not a power of two: rows fall into different cache sets
    for (int64_t i = 0; i < rows; i++)
      for (int64_t p = 0; p < depth; p += 16)
        store_part(load_part(a + i * row_stride + p, depth - p), buffer + i * ld + p, depth - p);
    return {buffer, ld, 1};
  }
  for (int64_t p = 0; p < depth; p++)
    for (int64_t i = 0; i < rows; i += 16)
      store_part(load_part(a + p * k_stride + i, rows - i), buffer + p * TASK_ROWS + i, rows - i);
  return {buffer, 1, TASK_ROWS};
}

// A block of the result: rows i0 .., columns j0 .., whose sums lie in rows of `width` floats.
struct ProductTask {
  int64_t i0, j0, rows, columns, width;
};

// The chains start from 0.
inline void from_zero(const ProductTask& t, float* c) { std::fill(c, c + t.rows * t.width, 0.0f); }

// a [m, k] times SIDES packed right-hand sides of n columns. begin(task, c) fills the starting values of a block's sums,
// finish(task, c) takes the sums; side s of a block lies TASK_ROWS * width floats after side s - 1.
template <typename T, int SIDES, typename Begin, typename Finish>
void product(const T* a, int64_t row_stride, int64_t k_stride, const T* const (&b)[SIDES], int64_t m, int64_t n,
             int64_t k, Begin begin, Finish finish) {
  const int threads = omp_get_max_threads();
  const int64_t row_tasks = (m + TASK_ROWS - 1) / TASK_ROWS;
  // Few rows: narrower tasks, so that every thread has some; the chain of an element does not change.
  int64_t width = std::min(TASK_COLUMNS / SIDES, (panels(n) * row_tasks + 4 * threads - 1) / (4 * threads) * PANEL);
  width = std::max<int64_t>(4 * PANEL, (width + 4 * PANEL - 1) / (4 * PANEL) * (4 * PANEL));
  const int64_t column_tasks = (n + width - 1) / width;
#pragma omp parallel if (SIDES * m * n * k > 8 * GRAIN)
  {
    // Not vectors: a product of one row would spend longer on zeroing them than on its sums.
    const std::unique_ptr<float[]> left(new float[TASK_ROWS * (DEPTH<T> + 16)]);
    const std::unique_ptr<float[]> c(new float[SIDES * TASK_ROWS * width]);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t ti = 0; ti < row_tasks; ti++)
      for (int64_t tj = 0; tj < column_tasks; tj++) {
        const int64_t i0 = ti * TASK_ROWS, j0 = tj * width;
        const ProductTask t{i0, j0, std::min(TASK_ROWS, m - i0), std::min(width, n - j0), width};
        for (int s = 0; s < SIDES; s++) begin(t, c.get() + s * TASK_ROWS * width);
        for (int64_t p0 = 0; p0 < k; p0 += DEPTH<T>) {
          const int64_t depth = std::min(DEPTH<T>, k - p0);
          LeftBlock l =
              copy_left(a + i0 * row_stride + p0 * k_stride, row_stride, k_stride, t.rows, depth, left.get());
          for (int s = 0; s < SIDES; s++)
            multiply(depth, t.rows, panels(t.columns), l.data, l.row_stride, l.k_stride,
                     b[s] + (j0 / PANEL * k + p0) * PANEL, PANEL, k * PANEL, c.get() + s * TASK_ROWS * width, width);
        }
        finish(t, c.get());
      }
  }
}

}  // namespace lockstep
