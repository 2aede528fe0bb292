// Causal attention over pages of keys and values in eight bits, for `numerics: fast`.
//
// A head of a token is its elements over its scale, the largest magnitude over 127, rounded to nearest even. The order
// of sums is that of attend.h over the integers, which are exact in float32; a score is then multiplied by its key's
// scale, and a probability, once it is in the row's sum, by its value's. So the result differs from attention over
// the same numbers read back only in roundings.
#include <memory>
#include <vector>

#include "attend_tasks.h"
#include "int8.h"

namespace lockstep {

namespace {

// One head of one token; its elements go `step` apart. Returns the scale.
template <typename T>
float quantise(const T* x, int64_t dim, int8_t* to, int64_t step) {
  float peak = 0.0f;
  for (int64_t j = 0; j < dim; j++) {
    const float magnitude = std::fabs(to_float(x[j]));
    peak = magnitude > peak || magnitude != magnitude ? magnitude : peak;
  }
  const float scale = peak / 127.0f, by = scale == 0.0f ? 1.0f : scale;
  for (int64_t j = 0; j < dim; j++) {
    const float n = std::nearbyint(to_float(x[j]) / by);
    to[j * step] = n == n ? int8_t(n) : int8_t(0);  // the scale of a NaN is NaN
  }
  return scale;
}

}  // namespace

template <typename T>
void write_kv_int8(const T* k, const T* v, const Int8Pages& pages, const int32_t* table, int64_t width,
                   const AttentionShape& a) {
  each_head(a, 1, [&](int64_t s, int64_t h) {
    for (int64_t t = a.starts[s]; t < a.starts[s + 1]; t++) {
      const int64_t slot = a.positions[t] % BLOCK, from = t * a.kv_heads + h;
      const int64_t head = table[s * width + a.positions[t] / BLOCK] * a.kv_heads + h;
      pages.k_scale[head * BLOCK + slot] =
          quantise(k + from * a.dim, a.dim, pages.k + head * a.dim * BLOCK + slot, BLOCK);
      pages.v_scale[head * BLOCK + slot] =
          quantise(v + from * a.v_dim, a.v_dim, pages.v + (head * BLOCK + slot) * a.v_dim, 1);
    }
  });
}

template <typename T>
void attention_paged_int8(const T* q, const Int8Pages& pages, const int32_t* table, int64_t width, T* out,
                          const AttentionShape& a) {
  const std::vector<Task> list = tasks(a);
  each_task(int64_t(list.size()), reads(list, a) > 4 * GRAIN, [&](int64_t i) {
    const Task& t = list[i];
    attend(q, out, nullptr, a, t, [&](int64_t b, int64_t) {
      const int64_t head = table[t.sequence * width + b] * a.kv_heads + t.kv_head;
      return KeyBlock<int8_t>{pages.k + head * a.dim * BLOCK, BLOCK, 16, pages.v + head * BLOCK * a.v_dim, a.v_dim, 16,
                              pages.k_scale + head * BLOCK, pages.v_scale + head * BLOCK};
    });
  });
}

#define INT8(T)                                                                                                      \
  template void write_kv_int8(const T*, const T*, const Int8Pages&, const int32_t*, int64_t, const AttentionShape&); \
  template void attention_paged_int8(const T*, const Int8Pages&, const int32_t*, int64_t, T*, const AttentionShape&)
INT8(float);
INT8(bf16);

}  // namespace lockstep
