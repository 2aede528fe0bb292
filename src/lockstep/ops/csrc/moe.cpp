// Rows to their experts and back, and the products between.
//
// Order (the contract): a product of an expert's rows is that of gemm.cpp, one chain over ascending k for each element,
// whichever rows are in the group; with its gated activation it is that of fused.cpp. A token's output is a chain of fma of weight with the expert's output over its
// experts in ascending order, in float32, rounded once. Gradients: of a weight matrix, a chain over the expert's rows
// (tokens ascending); of a token, the sum over its experts, ascending; of a router weight, sixteen lanes, then a tree.
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"
#include "moe.h"
#include "team.h"
#include "vec16.h"

namespace lockstep {

template <typename T>
void dispatch(const T* x, const int32_t* rows, T* y, int64_t count, int64_t d) {
  each(count, d, [&](int64_t r) { std::copy_n(x + int64_t(rows[r]) * d, d, y + r * d); });
}

template <typename T>
void dispatch_backward(const T* dy, const int32_t* slots, T* dx, int64_t tokens, int64_t top_k, int64_t d) {
  each(tokens, top_k * d, [&](int64_t t) {
    for (int64_t i = 0; i < d; i += 16) {
      F16 s = F16::zero();
      for (int64_t j = 0; j < top_k; j++) s = s + load_part(dy + slots[t * top_k + j] * d + i, d - i);
      store_part(s, dx + t * d + i, d - i);
    }
  });
}

template <typename T>
void combine(const T* y, const float* weights, const int32_t* slots, T* out, int64_t tokens, int64_t top_k, int64_t d) {
  each(tokens, top_k * d, [&](int64_t t) {
    for (int64_t i = 0; i < d; i += 16) {
      F16 s = F16::zero();
      for (int64_t j = 0; j < top_k; j++)
        s = fma(F16::all(weights[t * top_k + j]), load_part(y + slots[t * top_k + j] * d + i, d - i), s);
      store_part(s, out + t * d + i, d - i);
    }
  });
}

template <typename T>
void combine_backward(const T* d_out, const T* y, const float* weights, const int32_t* slots, T* dy, float* d_weights,
                      int64_t tokens, int64_t top_k, int64_t d) {
  each(tokens, top_k * d, [&](int64_t t) {
    for (int64_t j = 0; j < top_k; j++) {
      const int64_t row = slots[t * top_k + j] * d;
      const F16 w = F16::all(weights[t * top_k + j]);
      F16 s = F16::zero();
      for (int64_t i = 0; i < d; i += 16) {
        const F16 g = load_part(d_out + t * d + i, d - i);
        s = fma(g, load_part(y + row + i, d - i), s);
        store_part(w * g, dy + row + i, d - i);
      }
      d_weights[t * top_k + j] = sum(s);
    }
  });
}

namespace {

// Calls f(expert, first row, rows) for every expert with rows: side by side where there are enough of them and none is
// most of the work, the largest first, so that threads end together; else one after the other, so that the threads share
// each product. No chain depends on which.
template <typename F>
void each_expert(const int32_t* offsets, int64_t experts, F f) {
  std::vector<int64_t> active;
  int64_t largest = 0;
  for (int64_t e = 0; e < experts; e++) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    if (rows) active.push_back(e);
    largest = std::max(largest, rows);
  }
  const int64_t most = threads(), count = int64_t(active.size());
  const bool side_by_side = most > 1 && count >= 2 * most && largest * most <= offsets[experts];
  auto rows = [&](int64_t e) { return offsets[e + 1] - offsets[e]; };
  std::stable_sort(active.begin(), active.end(), [&](int64_t x, int64_t y) { return rows(x) > rows(y); });
  each_task(count, side_by_side, [&](int64_t i) { f(active[i], int64_t(offsets[active[i]]), rows(active[i])); });
}

}  // namespace

template <typename T, typename O>
void grouped_gemm(const T* a, const int32_t* offsets, int64_t experts, const T* const* packed, O* y, int64_t n,
                  int64_t k) {
  each_expert(offsets, experts, [&](int64_t e, int64_t first, int64_t rows) {
    gemm<T, O>(a + first * k, k, 1, packed[e], nullptr, y + first * n, rows, n, k, false);
  });
}

template <typename S, typename T, typename O>
void grouped_product(const T* a, const int32_t* offsets, int64_t experts, const S* const* weights, bool by_rows, O* y,
                     int64_t n, int64_t k) {
  each_expert(offsets, experts, [&](int64_t e, int64_t first, int64_t rows) {
    const std::unique_ptr<T[]> packed(new T[panels(n) * k * PANEL]);
    by_rows ? pack_rows(weights[e], k, n, packed.get()) : pack_columns(weights[e], n, k, packed.get());
    gemm<T, O>(a + first * k, k, 1, packed.get(), nullptr, y + first * n, rows, n, k, false);
  });
}

template <typename T>
void grouped_gated(const T* a, const int32_t* offsets, int64_t experts, const T* const* gates, const T* const* ups,
                   int kind, T* y, T* gate, T* up, int64_t n, int64_t k) {
  each_expert(offsets, experts, [&](int64_t e, int64_t first, int64_t rows) {
    gemm_gated(a + first * k, gates[e], ups[e], kind, y + first * n, gate ? gate + first * n : nullptr,
               up ? up + first * n : nullptr, rows, n, k);
  });
}

template <typename S, typename T>
void grouped_gated_product(const T* a, const int32_t* offsets, int64_t experts, const S* const* gates,
                           const S* const* ups, int kind, T* y, T* gate, T* up, int64_t n, int64_t k) {
  each_expert(offsets, experts, [&](int64_t e, int64_t first, int64_t rows) {
    const int64_t size = panels(n) * k * PANEL;
    const std::unique_ptr<T[]> packed(new T[2 * size]);
    pack_columns(gates[e], n, k, packed.get());
    pack_columns(ups[e], n, k, packed.get() + size);
    gemm_gated(a + first * k, packed.get(), packed.get() + size, kind, y + first * n, gate ? gate + first * n : nullptr,
               up ? up + first * n : nullptr, rows, n, k);
  });
}

template <typename T>
void grouped_weight_gradient(const T* dy, const T* x, const int32_t* offsets, int64_t experts, float* dw, int64_t n,
                             int64_t k) {
  for (int64_t e = 0; e < experts; e++)
    if (offsets[e] == offsets[e + 1]) std::fill_n(dw + e * n * k, n * k, 0.0f);
  each_expert(offsets, experts, [&](int64_t e, int64_t first, int64_t rows) {
    const std::unique_ptr<T[]> packed(new T[panels(k) * rows * PANEL]);
    pack_rows(x + first * k, rows, k, packed.get());
    gemm<T, float>(dy + first * n, 1, n, packed.get(), nullptr, dw + e * n * k, n, k, rows, false);
  });
}

#define GATED(S, T)                                                                                                   \
  template void grouped_gated_product(const T*, const int32_t*, int64_t, const S* const*, const S* const*, int, T*, T*, \
                                      T*, int64_t, int64_t)
GATED(float, float);
GATED(float, bf16);
GATED(bf16, float);
GATED(bf16, bf16);
#define MOE(T)                                                                                                       \
  template void dispatch(const T*, const int32_t*, T*, int64_t, int64_t);                                            \
  template void dispatch_backward(const T*, const int32_t*, T*, int64_t, int64_t, int64_t);                          \
  template void combine(const T*, const float*, const int32_t*, T*, int64_t, int64_t, int64_t);                      \
  template void combine_backward(const T*, const T*, const float*, const int32_t*, T*, float*, int64_t, int64_t,     \
                                 int64_t);                                                                           \
  template void grouped_gemm(const T*, const int32_t*, int64_t, const T* const*, T*, int64_t, int64_t);              \
  template void grouped_product(const T*, const int32_t*, int64_t, const float* const*, bool, T*, int64_t, int64_t); \
  template void grouped_product(const T*, const int32_t*, int64_t, const bf16* const*, bool, T*, int64_t, int64_t);  \
  template void grouped_gated(const T*, const int32_t*, int64_t, const T* const*, const T* const*, int, T*, T*, T*,   \
                              int64_t, int64_t);                                                                     \
  template void grouped_weight_gradient(const T*, const T*, const int32_t*, int64_t, float*, int64_t, int64_t)
MOE(float);
MOE(bf16);

}  // namespace lockstep
