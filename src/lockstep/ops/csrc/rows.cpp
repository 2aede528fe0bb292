// Operators on rows: rotary embedding, activations, copies for heads. Computed in float32, rounded once. The one sum, the
// gradient of the copies, goes over the heads in ascending order from 0.
#include <algorithm>

#include "activation.h"
#include "team.h"

namespace lockstep {

template <typename T>
void rope(const T* x, const int32_t* positions, const float* table, float sign, T* y, int64_t tokens, int64_t heads,
          int64_t dim) {
  const int64_t half = dim / 2;
  each(tokens, heads * dim, [&](int64_t t) {
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
  });
}

template <typename T>
void gated(const T* gate, const T* up, int activation, T* y, int64_t count) {
  each_sixteen(count, 1, [=](int64_t j, auto n) INLINE {
    F16 a = activate(load_part(gate + j, n), activation).value;
    store_part(a * load_part(up + j, n), y + j, n);
  });
}

template <typename T>
void activation(const T* x, int kind, T* y, int64_t count) {
  each_sixteen(count, 1, [=](int64_t j, auto n) INLINE {
    store_part(activate(load_part(x + j, n), kind).value, y + j, n);
  });
}

template <typename T>
void activation_backward(const T* dy, const T* x, int kind, T* dx, int64_t count) {
  each_sixteen(count, 1, [=](int64_t j, auto n) INLINE {
    store_part(load_part(dy + j, n) * activate(load_part(x + j, n), kind).slope, dx + j, n);
  });
}

template <typename T>
void gated_backward(const T* dy, const T* gate, const T* up, int activation, T* d_gate, T* d_up, int64_t count) {
  each_sixteen(count, 1, [=](int64_t j, auto n) INLINE {
    Activated a = activate(load_part(gate + j, n), activation);
    F16 g = load_part(dy + j, n);
    store_part(g * load_part(up + j, n) * a.slope, d_gate + j, n);
    store_part(g * a.value, d_up + j, n);
  });
}

template <typename T>
void share_heads(const T* x, T* y, int64_t tokens, int64_t heads, int64_t d) {
  each(tokens, heads * d, [&](int64_t t) {
    for (int64_t h = 0; h < heads; h++) std::copy_n(x + t * d, d, y + (t * heads + h) * d);
  });
}

template <typename T>
void share_heads_backward(const T* dy, T* dx, int64_t tokens, int64_t heads, int64_t d) {
  each(tokens, heads * d, [&](int64_t t) {
    for (int64_t j = 0; j < d; j += 16) {
      F16 s = F16::zero();
      for (int64_t h = 0; h < heads; h++) s = s + load_part(dy + (t * heads + h) * d + j, d - j);
      store_part(s, dx + t * d + j, d - j);
    }
  });
}

#define ELEMENTWISE(T)                                                                              \
  template void rope(const T*, const int32_t*, const float*, float, T*, int64_t, int64_t, int64_t); \
  template void activation(const T*, int, T*, int64_t);                                             \
  template void activation_backward(const T*, const T*, int, T*, int64_t);                          \
  template void gated(const T*, const T*, int, T*, int64_t);                                        \
  template void share_heads(const T*, T*, int64_t, int64_t, int64_t);                               \
  template void share_heads_backward(const T*, T*, int64_t, int64_t, int64_t);                      \
  template void gated_backward(const T*, const T*, const T*, int, T*, T*, int64_t)
ELEMENTWISE(float);
ELEMENTWISE(bf16);

}  // namespace lockstep
