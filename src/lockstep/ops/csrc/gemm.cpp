// Matrix products with a packed right-hand side.
//
// Reduction order (the contract): every output element is ONE chain of float32 fused multiply-adds over
// ascending k, starting from 0 (or, with `accumulate`, from the element's old value); then the bias is added;
// then the sum is rounded once to the output type. bfloat16 operands are widened exactly. Blocking in m, n and k,
// the number of rows and of threads change only where partial sums rest (registers or a float32 buffer), never
// the chain; so any row gives the same bits in any batch.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "tile.h"

namespace lockstep {

template <typename S, typename T>
void pack_columns(const S* source, int64_t n, int64_t k, T* out) {
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels(n); p++) {
    T* o = out + p * k * PANEL;
    int64_t width = std::min(PANEL, n - p * PANEL);
    const S* s = source + p * PANEL * k;
    for (int64_t c = 0; c < k; c += 16) {  // 16 x 16 at a time: both sides stay in the first-level cache
      int64_t end = std::min(c + 16, k);
      for (int64_t j = 0; j < PANEL; j++)
        for (int64_t i = c; i < end; i++) from_float(j < width ? to_float(s[j * k + i]) : 0.0f, o + i * PANEL + j);
    }
  }
}

template <typename S, typename T>
void pack_rows(const S* source, int64_t k, int64_t n, T* out) {
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels(n); p++) {
    int64_t width = std::min(PANEL, n - p * PANEL);
    for (int64_t i = 0; i < k; i++)
      load_part(source + i * n + p * PANEL, width).store(out + (p * k + i) * PANEL);
  }
}

namespace {

constexpr int64_t ROWS = 96;      // rows of a task (a multiple of every tile height)
constexpr int64_t COLUMNS = 256;  // columns of a task
// k of a block: a panel of it stays in the first-level cache, ROWS x DEPTH floats in the second-level one.
template <typename T>
constexpr int64_t DEPTH = sizeof(T) == 2 ? 384 : 256;

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
      store_part(load_part(a + p * k_stride + i, rows - i), buffer + p * ROWS + i, rows - i);
  return {buffer, 1, ROWS};
}

template <typename T, typename O>
void finish(const float* c, int64_t ldc, const T* bias, O* y, int64_t ldy, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j += 16) {
      F16 v = F16::load(c + i * ldc + j);
      if (bias) v = v + load_part(bias + j, columns - j);
      store_part(v, y + i * ldy + j, columns - j);
    }
}

}  // namespace

template <typename T, typename O>
void gemm(const T* a, int64_t row_stride, int64_t k_stride, const T* b, const T* bias, O* y, int64_t m, int64_t n,
          int64_t k, bool accumulate) {
  const int threads = omp_get_max_threads();
  const int64_t row_tasks = (m + ROWS - 1) / ROWS;
  // Few rows: narrower tasks, so that every thread has some; the chain of an element does not change.
  int64_t width = std::min(COLUMNS, (panels(n) * row_tasks + 4 * threads - 1) / (4 * threads) * PANEL);
  width = std::max<int64_t>(4 * PANEL, (width + 4 * PANEL - 1) / (4 * PANEL) * (4 * PANEL));
  const int64_t column_tasks = (n + width - 1) / width;
#pragma omp parallel if (m * n * k > 16 * GRAIN)
  {
    std::vector<float> left(ROWS * (DEPTH<T> + 16)), c(ROWS * width);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t ti = 0; ti < row_tasks; ti++)
      for (int64_t tj = 0; tj < column_tasks; tj++) {
        const int64_t i0 = ti * ROWS, j0 = tj * width;
        const int64_t rows = std::min(ROWS, m - i0), columns = std::min(width, n - j0);
        const int64_t used = panels(columns);
        if (accumulate) {
          for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j += 16)
              load_part(y + (i0 + i) * n + j0 + j, columns - j).store(c.data() + i * width + j);
        } else {
          std::fill(c.begin(), c.begin() + rows * width, 0.0f);
        }
        for (int64_t p0 = 0; p0 < k; p0 += DEPTH<T>) {
          const int64_t depth = std::min(DEPTH<T>, k - p0);
          LeftBlock l = copy_left(a + i0 * row_stride + p0 * k_stride, row_stride, k_stride, rows, depth, left.data());
          multiply(depth, rows, used, l.data, l.row_stride, l.k_stride, b + (j0 / PANEL * k + p0) * PANEL, PANEL,
                   k * PANEL, c.data(), width);
        }
        finish(c.data(), width, bias ? bias + j0 : nullptr, y + i0 * n + j0, n, rows, columns);
      }
  }
}

template <typename T>
void column_sums(const T* x, int64_t rows, int64_t columns, float* y) {
#pragma omp parallel for schedule(static)
  for (int64_t j = 0; j < columns; j += 16) {
    F16 s = F16::zero();
    for (int64_t i = 0; i < rows; i++) s = s + load_part(x + i * columns + j, columns - j);
    store_part(s, y + j, columns - j);
  }
}

template void pack_columns(const float*, int64_t, int64_t, float*);
template void pack_columns(const float*, int64_t, int64_t, bf16*);
template void pack_columns(const bf16*, int64_t, int64_t, float*);
template void pack_columns(const bf16*, int64_t, int64_t, bf16*);
template void pack_rows(const float*, int64_t, int64_t, float*);
template void pack_rows(const float*, int64_t, int64_t, bf16*);
template void pack_rows(const bf16*, int64_t, int64_t, float*);
template void pack_rows(const bf16*, int64_t, int64_t, bf16*);
#define GEMM(T, O) \
  template void gemm(const T*, int64_t, int64_t, const T*, const T*, O*, int64_t, int64_t, int64_t, bool)
GEMM(float, float);
GEMM(bf16, float);
GEMM(bf16, bf16);
template void column_sums(const float*, int64_t, int64_t, float*);
template void column_sums(const bf16*, int64_t, int64_t, float*);

}  // namespace lockstep
