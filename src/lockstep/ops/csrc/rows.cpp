// Operators on rows: RMS norm, rotary embedding, gated activation.
//
// Reduction order (the contract): a row's sum is sixteen lane chains (lane j adds elements j, j + 16, ... in
// ascending order; the tail's missing lanes add exact zeros) and then the tree of `sum`. Everything is computed in
// float32 and rounded once to the output type. Weight gradients are one chain per column over ascending rows.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "math16.h"

namespace lockstep {

template <typename X, typename T>
void rms_norm(const X* x, const T* weight, float eps, float offset, T* y, float* rstd, int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static) if (rows * d > GRAIN)
  for (int64_t i = 0; i < rows; i++) {
    const X* xi = x + i * d;
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
    float r = 1.0f / std::sqrt(sum(squares) / float(d) + eps);
    if (rstd) rstd[i] = r;
    for (int64_t j = 0; j < d; j += 16) {
      F16 w = load_part(weight + j, d - j) + F16::all(offset);
      store_part(load_part(xi + j, d - j) * F16::all(r) * w, y + i * d + j, d - j);
    }
  }
}

// With h = x rstd and g = dy (w + offset): dx = rstd (g - h mean(g h)), dw = sum over rows of dy h.
template <typename X, typename T>
void rms_norm_backward(const T* dy, const X* x, const T* weight, float offset, const float* rstd, X* dx, float* dw,
                       int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    const F16 r = F16::all(rstd[i]);
    auto h = [&](int64_t j) { return load_part(x + i * d + j, d - j) * r; };
    auto g = [&](int64_t j) {
      return load_part(dy + i * d + j, d - j) * (load_part(weight + j, d - j) + F16::all(offset));
    };
    F16 dot = F16::zero();
    for (int64_t j = 0; j < d; j += 16) dot = fma(g(j), h(j), dot);
    const F16 mean = F16::all(sum(dot) / float(d));
    for (int64_t j = 0; j < d; j += 16) store_part((g(j) - h(j) * mean) * r, dx + i * d + j, d - j);
  }
#pragma omp parallel for schedule(static)
  for (int64_t j = 0; j < d; j += 16) {
    F16 s = F16::zero();
    for (int64_t i = 0; i < rows; i++) {
      F16 h = load_part(x + i * d + j, d - j) * F16::all(rstd[i]);
      s = fma(load_part(dy + i * d + j, d - j), h, s);
    }
    store_part(s, dw + j, d - j);
  }
}

template <typename T>
void rope(const T* x, const int32_t* positions, const float* table, float sign, T* y, int64_t tokens, int64_t heads,
          int64_t dim) {
  const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (tokens * heads * dim > GRAIN)
  for (int64_t t = 0; t < tokens; t++) {
    const float* turn = table + positions[t] * dim;  // [half, 2]
    for (int64_t j = 0; j < half; j += 16) {
      const int64_t n = std::min<int64_t>(16, half - j);
      float c[16] = {}, s[16] = {};
      for (int64_t i = 0; i < n; i++) {
        c[i] = turn[2 * (j + i)];
        s[i] = sign * turn[2 * (j + i) + 1];
      }
      const F16 cos = F16::load(c), sin = F16::load(s);
      for (int64_t h = 0; h < heads; h++) {
        const int64_t at = (t * heads + h) * dim + j;
        const F16 a = load_part(x + at, n), b = load_part(x + at + half, n);
        store_part(a * cos - b * sin, y + at, n);
        store_part(b * cos + a * sin, y + at + half, n);
      }
    }
  }
}

namespace {

constexpr float GELU_A = 0.7978845608f;  // sqrt(2 / pi)
constexpr float GELU_B = 0.044715f;

struct Activated {
  F16 value, slope;
};

// silu(x) = x s, slope s (1 + x (1 - s)) with s = sigmoid(x). gelu (tanh form): x (1 + t) / 2.
inline Activated activate(F16 x, int activation) {
  const F16 one = F16::all(1.0f), half = F16::all(0.5f);
  if (activation == SILU) {
    F16 s = sigmoid(x);
    return {x * s, s * fma(x, one - s, one)};
  }
  F16 square = x * x;
  F16 t = tanh(F16::all(GELU_A) * fma(F16::all(GELU_B) * square, x, x));
  F16 inner = F16::all(GELU_A) * fma(F16::all(3.0f * GELU_B), square, one);
  F16 value = half * x * (one + t);
  return {value, fma(half * x * (one - t * t), inner, half * (one + t))};
}

}  // namespace

template <typename T>
void gated(const T* gate, const T* up, int activation, T* y, int64_t count) {
#pragma omp parallel for schedule(static) if (count > GRAIN)
  for (int64_t j = 0; j < count; j += 16) {
    F16 a = activate(load_part(gate + j, count - j), activation).value;
    store_part(a * load_part(up + j, count - j), y + j, count - j);
  }
}

template <typename T>
void gated_backward(const T* dy, const T* gate, const T* up, int activation, T* d_gate, T* d_up, int64_t count) {
#pragma omp parallel for schedule(static)
  for (int64_t j = 0; j < count; j += 16) {
    Activated a = activate(load_part(gate + j, count - j), activation);
    F16 g = load_part(dy + j, count - j);
    store_part(g * load_part(up + j, count - j) * a.slope, d_gate + j, count - j);
    store_part(g * a.value, d_up + j, count - j);
  }
}

#define NORM(X, T)                                                                        \
  template void rms_norm(const X*, const T*, float, float, T*, float*, int64_t, int64_t); \
  template void rms_norm_backward(const T*, const X*, const T*, float, const float*, X*, float*, int64_t, int64_t)
NORM(float, float);
NORM(float, bf16);
NORM(bf16, bf16);
#define ROWS(T)                                                                                     \
  template void rope(const T*, const int32_t*, const float*, float, T*, int64_t, int64_t, int64_t); \
  template void gated(const T*, const T*, int, T*, int64_t);                                        \
  template void gated_backward(const T*, const T*, const T*, int, T*, T*, int64_t)
ROWS(float);
ROWS(bf16);

}  // namespace lockstep
