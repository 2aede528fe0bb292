// Matrix products with a packed right-hand side.
//
// Reduction order (the contract): every output element is ONE chain of float32 fused multiply-adds over
// ascending k, starting from 0 (or, with `accumulate`, from the element's old value); then the bias is added;
// then the sum is rounded once to the output type. bfloat16 operands are widened exactly. Blocking in m, n and k,
// the number of rows and of threads change only where partial sums rest (registers or a float32 buffer), never
// the chain; so any row gives the same bits in any batch.
//
// In the device class cpu-avx512-bf16 a chain of bfloat16 operands goes by pairs of neighbouring k, (0, 1), (2, 3), ...,
// the last with a zero where k is odd, and a step of it is the `fma` of pairs16.h. In the class cpu-amx-bf16 it goes by
// tiles of 32 k, from the first k of the call on, the last with zeros where fewer are left: tiles.h.
#include <algorithm>

#include "product.h"
#include "transpose.h"

namespace lockstep {

template <typename S, typename T>
void pack_columns(const S* source, int64_t n, int64_t k, T* out) {
  each(panels(n), PANEL * k, [&](int64_t p) {
    alignas(64) float block[256] = {}, turned[256];  // rows behind the last column of the product stay zero
    const int64_t width = std::min(PANEL, n - p * PANEL);
    for (int64_t c = 0; c < k; c += 16 * STEP<T>) {
      for (int64_t j = 0; j < width; j++) words_along<T>(source + (p * PANEL + j) * k + c, k - c).store(block + 16 * j);
      transpose16(block, turned);
      for (int64_t i = c, step = 0; step < 16 && i < k; i += STEP<T>, step++)
        store_step(F16::load(turned + 16 * step), k - i, out + (p * k + i) * PANEL);
    }
  });
}

template <typename S, typename T>
void pack_rows(const S* source, int64_t k, int64_t n, T* out) {
  constexpr int64_t ROWS = 32;  // of the source at a time: read along its rows, written along the panels
  each((k + ROWS - 1) / ROWS, ROWS * n, [&](int64_t r) {
    for (int64_t p = 0; p < panels(n); p++)
      for (int64_t i = r * ROWS; i < std::min((r + 1) * ROWS, k); i += STEP<T>)
        store_step(words_across<T>(source + i * n + p * PANEL, n, k - i, n - p * PANEL), k - i,
                   out + (p * k + i) * PANEL);
  });
}

template <typename T, typename O>
void gemm(const T* a, int64_t row_stride, int64_t k_stride, const T* b, const T* bias, O* y, int64_t m, int64_t n,
          int64_t k, bool accumulate) {
  auto begin = [&](const ProductTask& t, float* c) {
    for (int64_t i = 0; i < t.rows; i++)
      for (int64_t j = 0; j < t.columns; j += 16)
        load_part(y + (t.i0 + i) * n + t.j0 + j, t.columns - j).store(c + i * t.width + j);
  };
  auto finish = [&](const ProductTask& t, const float* c) {
    for (int64_t i = 0; i < t.rows; i++)
      for (int64_t j = 0; j < t.columns; j += 16) {
        F16 v = F16::load(c + i * t.width + j);
        if (bias) v = v + load_part(bias + t.j0 + j, t.columns - j);
        store_part(v, y + (t.i0 + i) * n + t.j0 + j, t.columns - j);
      }
  };
  const Right<T, 1> right{{b}, n};
  accumulate ? product<T, 1>(a, row_stride, k_stride, right, m, k, begin, finish)
             : product<T, 1>(a, row_stride, k_stride, right, m, k, from_zero, finish);
}

template <typename T>
void column_sums(const T* x, int64_t rows, int64_t columns, float* y) {
  each_sixteen(columns, rows, [=](int64_t j, auto n) INLINE {
    F16 s = F16::zero();
    for (int64_t i = 0; i < rows; i++) s = s + load_part(x + i * columns + j, n);
    store_part(s, y + j, n);
  });
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
