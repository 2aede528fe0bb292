// RMS norm and layer norm, each also with the residual sum before it.
//
// Reduction order (the contract): a row's sum is sixteen lane chains (lane j adds elements j, j + 16, ... in
// ascending order; the tail's missing lanes add exact zeros) and then the tree of `sum`. Everything is computed in
// float32 and rounded once to the output type. Weight gradients are one chain per column over ascending rows.
// With a residual, x + h is rounded to float32 before anything else, as the sum by itself is; backward likewise.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "team.h"
#include "vec16.h"

namespace lockstep {

namespace {

// Row i of what is normed: x's own, or x + h written to `sum`.
template <typename X, typename T>
const X* normed_row(const X* x, const Residual<T>& r, int64_t i, int64_t d) {
  if constexpr (std::is_same_v<X, float>)
    if (r.h) {
      float* s = r.sum + i * d;
      for (int64_t j = 0; j < d; j += 16)
        store_part(load_part(x + i * d + j, d - j) + load_part(r.h + i * d + j, d - j), s + j, d - j);
      return s;
    }
  return x + i * d;
}

// The gradient of 16 elements of x; with a residual plus that of the sum, and a rounded copy for h.
template <typename X, typename T>
void store_gradient(F16 v, const ResidualGradient<T>& r, X* dx, int64_t at, int64_t n) {
  if (r.d_sum) v = load_part(r.d_sum + at, n) + v;
  store_part(v, dx + at, n);
  if (r.dh) store_part(v, r.dh + at, n);
}

}  // namespace

template <typename X, typename T>
void rms_norm(const X* x, const T* weight, float eps, float offset, T* y, float* rstd, int64_t rows, int64_t d,
              Residual<T> residual) {
  each(rows, d, [&](int64_t i) {
    const X* xi = normed_row(x, residual, i, d);
    F16 squares = F16::zero();
    for (int64_t j = 0; j < d; j += 16) {
#ifdef LOCKSTEP_TEST_REORDER  // breaks the contract on purpose: a test shows that `lockstep eval bits` finds it
      const int64_t at = rows > 1 ? (d - 1) / 16 * 16 - j : j;
#else
      const int64_t at = j;
#endif
      F16 v = load_part(xi + at, d - at);
      squares = fma(v, v, squares);
    }
    const float r = 1.0f / std::sqrt(sum(squares) / float(d) + eps);
    rstd[i] = r;
    for (int64_t j = 0; j < d; j += 16) {
      F16 w = load_part(weight + j, d - j) + F16::all(offset);
      store_part(load_part(xi + j, d - j) * F16::all(r) * w, y + i * d + j, d - j);
    }
  });
}

// With h = x rstd and g = dy (w + offset): dx = rstd (g - h mean(g h)), dw = sum over rows of dy h.
template <typename X, typename T>
void rms_norm_backward(const T* dy, const X* x, const T* weight, float offset, const float* rstd, X* dx, float* dw,
                       int64_t rows, int64_t d, ResidualGradient<T> residual) {
  each(rows, d, [&](int64_t i) {
    const F16 r = F16::all(rstd[i]);
    auto h = [&](int64_t j) { return load_part(x + i * d + j, d - j) * r; };
    auto g = [&](int64_t j) {
      return load_part(dy + i * d + j, d - j) * (load_part(weight + j, d - j) + F16::all(offset));
    };
    F16 dot = F16::zero();
    for (int64_t j = 0; j < d; j += 16) dot = fma(g(j), h(j), dot);
    const F16 mean = F16::all(sum(dot) / float(d));
    for (int64_t j = 0; j < d; j += 16) store_gradient((g(j) - h(j) * mean) * r, residual, dx, i * d + j, d - j);
  });
  rms_norm_weight_gradient<X, T>(dy, x, rstd, nullptr, dw, rows, d);
}

// dw alone; `before`, where given, is that of the rows before these, and the chain goes on from it.
template <typename X, typename T>
void rms_norm_weight_gradient(const T* dy, const X* x, const float* rstd, const float* before, float* dw, int64_t rows,
                              int64_t d) {
  each_sixteen(d, rows, [&](int64_t j) {
    F16 s = before ? load_part(before + j, d - j) : F16::zero();
    for (int64_t i = 0; i < rows; i++) {
      F16 h = load_part(x + i * d + j, d - j) * F16::all(rstd[i]);
      s = fma(load_part(dy + i * d + j, d - j), h, s);
    }
    store_part(s, dw + j, d - j);
  });
}

// y = (x - mean) rstd w + b; the mean first, then the mean of the squared differences from it.
template <typename X, typename T>
void layer_norm(const X* x, const T* weight, const T* bias, float eps, T* y, float* mean, float* rstd, int64_t rows,
                int64_t d, Residual<T> residual) {
  each(rows, d, [&](int64_t i) {
    const X* xi = normed_row(x, residual, i, d);
    F16 total = F16::zero(), squares = F16::zero();
    for (int64_t j = 0; j < d; j += 16) total = total + load_part(xi + j, d - j);
    mean[i] = sum(total) / float(d);
    const F16 m = F16::all(mean[i]);
    for (int64_t j = 0; j < d; j += 16) {
      const F16 v = load_part(xi + j, d - j, mean[i]) - m;  // the tail's missing lanes are 0
      squares = fma(v, v, squares);
    }
    rstd[i] = 1.0f / std::sqrt(sum(squares) / float(d) + eps);
    const F16 r = F16::all(rstd[i]);
    for (int64_t j = 0; j < d; j += 16) {
      F16 v = (load_part(xi + j, d - j) - m) * r * load_part(weight + j, d - j);
      if (bias) v = v + load_part(bias + j, d - j);
      store_part(v, y + i * d + j, d - j);
    }
  });
}

// With h = (x - mean) rstd and g = dy w: dx = rstd (g - mean(g) - h mean(g h)), dw = sum of dy h, db = sum of dy.
template <typename X, typename T>
void layer_norm_backward(const T* dy, const X* x, const T* weight, const float* mean, const float* rstd, X* dx,
                         float* dw, float* db, int64_t rows, int64_t d, ResidualGradient<T> residual) {
  each(rows, d, [&](int64_t i) {
    const F16 m = F16::all(mean[i]), r = F16::all(rstd[i]);
    auto h = [&](int64_t j) { return (load_part(x + i * d + j, d - j) - m) * r; };
    auto g = [&](int64_t j) { return load_part(dy + i * d + j, d - j) * load_part(weight + j, d - j); };
    F16 total = F16::zero(), dot = F16::zero();
    for (int64_t j = 0; j < d; j += 16) {
      total = total + g(j);
      dot = fma(g(j), h(j), dot);
    }
    const F16 mean_g = F16::all(sum(total) / float(d)), mean_gh = F16::all(sum(dot) / float(d));
    for (int64_t j = 0; j < d; j += 16)
      store_gradient((g(j) - mean_g - h(j) * mean_gh) * r, residual, dx, i * d + j, d - j);
  });
  each_sixteen(d, rows, [&](int64_t j) {
    F16 s = F16::zero(), t = F16::zero();
    for (int64_t i = 0; i < rows; i++) {
      const F16 g = load_part(dy + i * d + j, d - j);
      s = fma(g, (load_part(x + i * d + j, d - j) - F16::all(mean[i])) * F16::all(rstd[i]), s);
      t = t + g;
    }
    store_part(s, dw + j, d - j);
    store_part(t, db + j, d - j);
  });
}

#define NORM(X, T)                                                                                                    \
  template void rms_norm(const X*, const T*, float, float, T*, float*, int64_t, int64_t, Residual<T>);                \
  template void rms_norm_backward(const T*, const X*, const T*, float, const float*, X*, float*, int64_t, int64_t,    \
                                  ResidualGradient<T>);                                                               \
  template void rms_norm_weight_gradient(const T*, const X*, const float*, const float*, float*, int64_t, int64_t);   \
  template void layer_norm(const X*, const T*, const T*, float, T*, float*, float*, int64_t, int64_t, Residual<T>);   \
  template void layer_norm_backward(const T*, const X*, const T*, const float*, const float*, X*, float*, float*,     \
                                    int64_t, int64_t, ResidualGradient<T>)
NORM(float, float);
NORM(float, bf16);
NORM(bf16, bf16);

}  // namespace lockstep
