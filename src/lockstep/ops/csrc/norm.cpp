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

// body(j, n) for every sixteen elements of a row, from j on: n is 16, known while compiling; at the end what is left.
template <typename Body>
INLINE inline void each_vector(int64_t d, Body body) {
  int64_t j = 0;
  for (; j + 16 <= d; j += 16) body(j, std::integral_constant<int64_t, 16>{});
  if (j < d) body(j, d - j);
}

// Row i of what is normed: x's own, or x + h written to `sum`.
template <typename X, typename T>
const X* normed_row(const X* x, const Residual<T>& r, int64_t i, int64_t d) {
  if constexpr (std::is_same_v<X, float>)
    if (r.h) {
      const float* xi = x + i * d;
      const T* hi = r.h + i * d;
      float* s = r.sum + i * d;
      each_vector(d, [=](int64_t j, auto n) INLINE {
        store_part(load_part(xi + j, n) + load_part(hi + j, n), s + j, n);
      });
      return s;
    }
  return x + i * d;
}

// Where a row's gradient goes: dx; with a residual plus that of the sum, and a rounded copy for h.
template <typename X, typename T>
struct RowGradient {
  X* dx;
  const float* d_sum;
  T* dh;

  RowGradient(X* dx, const ResidualGradient<T>& r, int64_t at)
      : dx(dx + at), d_sum(r.d_sum ? r.d_sum + at : nullptr), dh(r.dh ? r.dh + at : nullptr) {}

  template <typename N>
  INLINE void store(F16 v, int64_t j, N n) const {
    if (d_sum) v = load_part(d_sum + j, n) + v;
    store_part(v, dx + j, n);
    if (dh) store_part(v, dh + j, n);
  }
};

// Chains over the rows, one for each column: body(count, j, n) adds up those of `count` vectors of columns from j on,
// two where there are, so that whole lines of memory are read; n is 16, or what is left at the end.
template <typename Body>
void each_columns(int64_t d, int64_t rows, Body body) {
  constexpr int64_t WIDE = 32;
  each((d + WIDE - 1) / WIDE, WIDE * rows, [&](int64_t i) {
    const int64_t j = i * WIDE;
    using One = std::integral_constant<int, 1>;
    if (j + WIDE <= d) return body(std::integral_constant<int, 2>{}, j, std::integral_constant<int64_t, 16>{});
    each_vector(d - j, [&](int64_t at, auto n) { body(One{}, j + at, n); });
  });
}

}  // namespace

template <typename X, typename T>
void rms_norm(const X* x, const T* weight, float eps, float offset, T* y, float* rstd, int64_t rows, int64_t d,
              Residual<T> residual) {
  each(rows, d, [&](int64_t i) {
    const X* xi = normed_row(x, residual, i, d);
    T* yi = y + i * d;
    const T* w = weight;
    F16 squares = F16::zero();
#ifdef LOCKSTEP_TEST_REORDER  // breaks the contract on purpose: a test shows that `lockstep eval bits` finds it
    for (int64_t j = 0; j < d; j += 16) {
      const int64_t at = rows > 1 ? (d - 1) / 16 * 16 - j : j;
      const F16 v = load_part(xi + at, d - at);
      squares = fma(v, v, squares);
    }
#else
    each_vector(d, [&](int64_t j, auto n) INLINE {
      const F16 v = load_part(xi + j, n);
      squares = fma(v, v, squares);
    });
#endif
    rstd[i] = 1.0f / std::sqrt(sum(squares) / float(d) + eps);
    const F16 r = F16::all(rstd[i]), added = F16::all(offset);
    each_vector(d, [=](int64_t j, auto n) INLINE {
      store_part(load_part(xi + j, n) * r * (load_part(w + j, n) + added), yi + j, n);
    });
  });
}

// With h = x rstd and g = dy (w + offset): dx = rstd (g - h mean(g h)), dw = sum over rows of dy h.
template <typename X, typename T>
void rms_norm_backward(const T* dy, const X* x, const T* weight, float offset, const float* rstd, X* dx, float* dw,
                       int64_t rows, int64_t d, ResidualGradient<T> residual) {
  each(rows, d, [&](int64_t i) {
    const X* xi = x + i * d;
    const T *gi = dy + i * d, *w = weight;
    const F16 r = F16::all(rstd[i]), added = F16::all(offset);
    auto h = [=](int64_t j, auto n) INLINE { return load_part(xi + j, n) * r; };
    auto g = [=](int64_t j, auto n) INLINE { return load_part(gi + j, n) * (load_part(w + j, n) + added); };
    F16 dot = F16::zero();
    each_vector(d, [&](int64_t j, auto n) INLINE { dot = fma(g(j, n), h(j, n), dot); });
    const F16 mean = F16::all(sum(dot) / float(d));
    const RowGradient<X, T> to(dx, residual, i * d);
    each_vector(d, [=](int64_t j, auto n) INLINE { to.store((g(j, n) - h(j, n) * mean) * r, j, n); });
  });
  rms_norm_weight_gradient<X, T>(dy, x, rstd, nullptr, dw, rows, d);
}

// dw alone; `before`, where given, is that of the rows before these, and the chain goes on from it.
template <typename X, typename T>
void rms_norm_weight_gradient(const T* dy, const X* x, const float* rstd, const float* before, float* dw, int64_t rows,
                              int64_t d) {
  each_columns(d, rows, [&](auto count, int64_t j, auto n) {
    F16 s[count];
    for (int c = 0; c < count; c++) s[c] = before ? load_part(before + j + 16 * c, n) : F16::zero();
    const X* xi = x + j;
    const T* gi = dy + j;
    for (int64_t i = 0; i < rows; i++, xi += d, gi += d) {
      const F16 r = F16::all(rstd[i]);
      for (int c = 0; c < count; c++) s[c] = fma(load_part(gi + 16 * c, n), load_part(xi + 16 * c, n) * r, s[c]);
    }
    for (int c = 0; c < count; c++) store_part(s[c], dw + j + 16 * c, n);
  });
}

// y = (x - mean) rstd w + b; the mean first, then the mean of the squared differences from it.
template <typename X, typename T>
void layer_norm(const X* x, const T* weight, const T* bias, float eps, T* y, float* mean, float* rstd, int64_t rows,
                int64_t d, Residual<T> residual) {
  each(rows, d, [&](int64_t i) {
    const X* xi = normed_row(x, residual, i, d);
    T* yi = y + i * d;
    const T *w = weight, *b = bias;
    F16 total = F16::zero(), squares = F16::zero();
    each_vector(d, [&](int64_t j, auto n) INLINE { total = total + load_part(xi + j, n); });
    const float middle = sum(total) / float(d);
    const F16 m = F16::all(middle);
    each_vector(d, [&](int64_t j, auto n) INLINE {
      const F16 v = load_part(xi + j, n, middle) - m;  // the tail's missing lanes are 0
      squares = fma(v, v, squares);
    });
    mean[i] = middle;
    rstd[i] = 1.0f / std::sqrt(sum(squares) / float(d) + eps);
    const F16 r = F16::all(rstd[i]);
    each_vector(d, [=](int64_t j, auto n) INLINE {
      F16 v = (load_part(xi + j, n) - m) * r * load_part(w + j, n);
      if (b) v = v + load_part(b + j, n);
      store_part(v, yi + j, n);
    });
  });
}

// With h = (x - mean) rstd and g = dy w: dx = rstd (g - mean(g) - h mean(g h)), dw = sum of dy h, db = sum of dy.
template <typename X, typename T>
void layer_norm_backward(const T* dy, const X* x, const T* weight, const float* mean, const float* rstd, X* dx,
                         float* dw, float* db, int64_t rows, int64_t d, ResidualGradient<T> residual) {
  each(rows, d, [&](int64_t i) {
    const X* xi = x + i * d;
    const T *gi = dy + i * d, *w = weight;
    const F16 m = F16::all(mean[i]), r = F16::all(rstd[i]);
    auto h = [=](int64_t j, auto n) INLINE { return (load_part(xi + j, n) - m) * r; };
    auto g = [=](int64_t j, auto n) INLINE { return load_part(gi + j, n) * load_part(w + j, n); };
    F16 total = F16::zero(), dot = F16::zero();
    each_vector(d, [&](int64_t j, auto n) INLINE {
      total = total + g(j, n);
      dot = fma(g(j, n), h(j, n), dot);
    });
    const F16 mean_g = F16::all(sum(total) / float(d)), mean_gh = F16::all(sum(dot) / float(d));
    const RowGradient<X, T> to(dx, residual, i * d);
    each_vector(d, [=](int64_t j, auto n) INLINE {
      to.store((g(j, n) - mean_g - h(j, n) * mean_gh) * r, j, n);
    });
  });
  each_columns(d, rows, [&](auto count, int64_t j, auto n) {
    F16 s[count], t[count];
    for (int c = 0; c < count; c++) s[c] = t[c] = F16::zero();
    const X* xi = x + j;
    const T* gi = dy + j;
    for (int64_t i = 0; i < rows; i++, xi += d, gi += d) {
      const F16 m = F16::all(mean[i]), r = F16::all(rstd[i]);
      for (int c = 0; c < count; c++) {
        const F16 g = load_part(gi + 16 * c, n);
        s[c] = fma(g, (load_part(xi + 16 * c, n) - m) * r, s[c]);
        t[c] = t[c] + g;
      }
    }
    for (int c = 0; c < count; c++) {
      store_part(s[c], dw + j + 16 * c, n);
      store_part(t[c], db + j + 16 * c, n);
    }
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
