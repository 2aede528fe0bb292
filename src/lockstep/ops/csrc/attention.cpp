// Causal attention over blocks of 64 keys aligned to position 0: one inner loop for training, prefill and decode.
// The order of its sums stands at the head of attend.h.
#include <algorithm>
#include <memory>
#include <vector>

#include "attend_tasks.h"
#include "panels.h"

namespace lockstep {

namespace {

constexpr int64_t FEW_ROWS = 2 * GROUP_ROWS;  // up to here a page is read as it lies: widening it would take longer

// Keys [dim][BLOCK] and values [BLOCK][v_dim] of a page as float32 panels.
template <typename T>
KeyBlock<float> widened(const T* k, const T* v, int64_t keys, const AttentionShape& a, float* buffer) {
  for (int64_t t = 0; t < keys; t += 16)
    for (int64_t p = 0; p < a.dim; p++) F16::load(k + p * BLOCK + t).store(buffer + (t / 16 * a.dim + p) * 16);
  plain_panels(v, a.v_dim, keys, a.v_dim, buffer + BLOCK * a.dim);
  return panel_block(buffer, buffer + BLOCK * a.dim, a);
}

}  // namespace

template <typename T>
void write_kv(const T* k, const T* v, T* k_pages, T* v_pages, const int32_t* table, int64_t width,
              const AttentionShape& a) {
  each_head(a, 1, [&](int64_t s, int64_t h) {
    for (int64_t t = a.starts[s]; t < a.starts[s + 1]; t++) {
      const int64_t page = table[s * width + a.positions[t] / BLOCK], slot = a.positions[t] % BLOCK;
      const T* from = k + (t * a.kv_heads + h) * a.dim;
      T* to = k_pages + (page * a.kv_heads + h) * a.dim * BLOCK + slot;
      for (int64_t j = 0; j < a.dim; j++) to[j * BLOCK] = from[j];
      std::copy_n(v + (t * a.kv_heads + h) * a.v_dim, a.v_dim,
                  v_pages + ((page * a.kv_heads + h) * BLOCK + slot) * a.v_dim);
    }
  });
}

template <typename T>
void attention_paged(const T* q, const T* k_pages, const T* v_pages, const int32_t* table, int64_t width, T* out,
                     const AttentionShape& a) {
  const std::vector<Task> list = tasks(a);
  const int64_t per = a.heads / a.kv_heads, k_head = a.dim * BLOCK, v_head = a.v_dim * BLOCK;
  each_task(int64_t(list.size()), reads(list, a) > 4 * GRAIN, [&](int64_t i) {
    const Task& t = list[i];
    auto head = [&](int64_t b) { return table[t.sequence * width + b] * a.kv_heads + t.kv_head; };
    if (t.count * per <= FEW_ROWS) {
      const Soon<T> first{k_pages + head(first_block(a, t)) * k_head, k_head};
      for (int64_t half : {0, 1}) first.fetch(half);
      attend(q, out, nullptr, a, t, [&](int64_t b, int64_t keys) {
        const T* v = v_pages + head(b) * v_head;
        const Soon<T> next = b + 1 < end_block(a, t) ? Soon<T>{k_pages + head(b + 1) * k_head, k_head} : Soon<T>{};
        return KeyBlock<T>{k_pages + head(b) * k_head, BLOCK, 16, v, a.v_dim, 16, nullptr, nullptr,
                           {v, keys * a.v_dim}, next};
      });
    } else {
      const std::unique_ptr<float[]> wide(new float[k_head + v_head]);
      attend(q, out, nullptr, a, t, [&](int64_t b, int64_t keys) {
        return widened(k_pages + head(b) * k_head, v_pages + head(b) * v_head, keys, a, wide.get());
      });
    }
  });
}

template <typename T>
void attention_packed(const T* q, const T* k, const T* v, T* out, float* lse, const AttentionShape& a) {
  // Keys and values once as float32 panels, for all tasks that read them.
  std::vector<int64_t> first_block(a.sequences + 1, 0);
  for (int64_t s = 0; s < a.sequences; s++)
    first_block[s + 1] = first_block[s] + (a.starts[s + 1] - a.starts[s] + BLOCK - 1) / BLOCK;
  const int64_t blocks = first_block[a.sequences], k_row = a.kv_heads * a.dim, v_row = a.kv_heads * a.v_dim;
  const int64_t k_size = a.dim * BLOCK, v_size = a.v_dim * BLOCK;
  const std::unique_ptr<float[]> keys(new float[a.kv_heads * blocks * k_size]);
  const std::unique_ptr<float[]> values(new float[a.kv_heads * blocks * v_size]);
  each_head(a, 1, [&](int64_t s, int64_t h) {
    for (int64_t t = a.starts[s], at = h * blocks + first_block[s]; t < a.starts[s + 1]; t += BLOCK, at++) {
      const int64_t count = std::min<int64_t>(BLOCK, a.starts[s + 1] - t);
      turned_panels(k + t * k_row + h * a.dim, k_row, count, a.dim, keys.get() + at * k_size);
      plain_panels(v + t * v_row + h * a.v_dim, v_row, count, a.v_dim, values.get() + at * v_size);
    }
  });
  const std::vector<Task> list = tasks(a);
  each_task(int64_t(list.size()), reads(list, a) > 4 * GRAIN, [&](int64_t i) {
    const int64_t at = list[i].kv_head * blocks + first_block[list[i].sequence];
    attend(q, out, lse, a, list[i], [&](int64_t b, int64_t) {
      return panel_block(keys.get() + (at + b) * k_size, values.get() + (at + b) * v_size, a);
    });
  });
}

#define ATTENTION(T)                                                                                                \
  template void write_kv(const T*, const T*, T*, T*, const int32_t*, int64_t, const AttentionShape&);               \
  template void attention_paged(const T*, const T*, const T*, const int32_t*, int64_t, T*, const AttentionShape&);  \
  template void attention_packed(const T*, const T*, const T*, T*, float*, const AttentionShape&)
ATTENTION(float);
ATTENTION(bf16);

}  // namespace lockstep
