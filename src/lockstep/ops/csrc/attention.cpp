// Causal attention over blocks of 64 keys aligned to position 0: one inner loop for training, prefill and decode.
// The order of its sums stands at the head of attend.h.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attend.h"
#include "kernels.h"

namespace lockstep {

namespace {

constexpr int64_t QUERIES = 32;  // positions of a task

// Where the keys and values of one (sequence, kv head) lie.
template <typename T>
struct Keys {
  const T* k_base;  // block j: k_base + page(j) * k_page, as [dim][BLOCK]
  const T* v_base;  // block j: v_base + page(j) * v_page, rows v_row apart
  int64_t k_page, v_page, v_row;
  const int32_t* table;  // null: page(j) = j
  int64_t page(int64_t j) const { return table ? table[j] : j; }
  const T* k(int64_t j) const { return k_base + page(j) * k_page; }
  const T* v(int64_t j) const { return v_base + page(j) * v_page; }
};

// Rows first .. first + count - 1 of one kv head's query heads: (position, head) with the heads innermost.
template <typename T>
void attend(const T* q, const Keys<T>& keys, T* out, float* lse, const AttentionShape& a, int64_t kv_head,
            int64_t first, int64_t count) {
  const int64_t per = a.heads / a.kv_heads, total = count * per, dim = a.dim, v_dim = a.v_dim;
  std::vector<float> query(TILE_ROWS * dim), acc(TILE_ROWS * v_dim), s(TILE_ROWS * BLOCK);
  for (int64_t r0 = 0; r0 < total; r0 += TILE_ROWS) {
    Group g;
    g.rows = std::min<int64_t>(TILE_ROWS, total - r0);
    auto row = [&](int64_t i) { return (first + (r0 + i) / per) * a.heads + kv_head * per + (r0 + i) % per; };
    int64_t begin = INT64_MAX, end = 0;
    for (int64_t i = 0; i < g.rows; i++) {
      g.position[i] = a.positions[first + (r0 + i) / per];
      g.m[i] = -INFINITY;
      g.l[i] = 0.0f;
      begin = std::min(begin, a.window ? std::max<int64_t>(0, g.position[i] - a.window + 1) : 0);
      end = std::max(end, g.position[i] + 1);
      for (int64_t j = 0; j < dim; j += 16)
        (F16::load(q + row(i) * dim + j) * F16::all(a.scale * LOG2E)).store(query.data() + i * dim + j);
    }
    std::fill(acc.begin(), acc.end(), 0.0f);
    for (int64_t b = begin / BLOCK; b * BLOCK < end; b++) {
      see(g, b, a.window);
      score_block(g, query.data(), dim, keys.k(b), s.data());
      softmax_rows(g, s.data(), acc.data(), v_dim, a.softcap);
      add_values(g, s.data(), keys.v(b), keys.v_row, acc.data(), v_dim);
    }
    for (int64_t i = 0; i < g.rows; i++) {
      for (int64_t j = 0; j < v_dim; j += 16)
        (F16::load(acc.data() + i * v_dim + j) / F16::all(g.l[i])).store(out + row(i) * v_dim + j);
      if (lse) lse[row(i)] = g.m[i] + float(std::log2(double(g.l[i])));
    }
  }
}

struct Task {
  int64_t sequence, kv_head, first, count;
};

// Key elements that all tasks read, about: whether more than one thread is worth waking.
int64_t reads(const std::vector<Task>& list, const AttentionShape& a) {
  int64_t sum = 0;
  for (const Task& t : list) sum += t.count * (a.positions[t.first + t.count - 1] + 1) * a.dim;
  return sum * (a.heads / a.kv_heads);
}

// Every (sequence, kv head, run of query positions), the longest walks first so that threads end together.
std::vector<Task> tasks(const AttentionShape& a) {
  std::vector<Task> list;
  for (int64_t s = 0; s < a.sequences; s++)
    for (int64_t first = a.starts[s]; first < a.starts[s + 1]; first += QUERIES)
      for (int64_t h = 0; h < a.kv_heads; h++)
        list.push_back({s, h, first, std::min<int64_t>(QUERIES, a.starts[s + 1] - first)});
  std::stable_sort(list.begin(), list.end(), [&](const Task& x, const Task& y) {
    return a.positions[x.first + x.count - 1] > a.positions[y.first + y.count - 1];
  });
  return list;
}

}  // namespace

template <typename T>
void write_kv(const T* k, const T* v, T* k_pages, T* v_pages, const int32_t* table, int64_t width,
              const AttentionShape& a) {
#pragma omp parallel for schedule(static) collapse(2) if (a.tokens * a.kv_heads * a.dim > GRAIN)
  for (int64_t s = 0; s < a.sequences; s++)
    for (int64_t h = 0; h < a.kv_heads; h++)
      for (int64_t t = a.starts[s]; t < a.starts[s + 1]; t++) {
        const int64_t page = table[s * width + a.positions[t] / BLOCK], slot = a.positions[t] % BLOCK;
        const T* from = k + (t * a.kv_heads + h) * a.dim;
        T* to = k_pages + (page * a.kv_heads + h) * a.dim * BLOCK + slot;
        for (int64_t j = 0; j < a.dim; j++) to[j * BLOCK] = from[j];
        std::copy_n(v + (t * a.kv_heads + h) * a.v_dim, a.v_dim,
                    v_pages + ((page * a.kv_heads + h) * BLOCK + slot) * a.v_dim);
      }
}

template <typename T>
void attention_paged(const T* q, const T* k_pages, const T* v_pages, const int32_t* table, int64_t width, T* out,
                     const AttentionShape& a) {
  const std::vector<Task> list = tasks(a);
  const int64_t k_head = a.dim * BLOCK, v_head = a.v_dim * BLOCK;
#pragma omp parallel for schedule(dynamic) if (reads(list, a) > 4 * GRAIN)
  for (size_t i = 0; i < list.size(); i++) {
    const Task& t = list[i];
    Keys<T> keys{k_pages + t.kv_head * k_head, v_pages + t.kv_head * v_head, a.kv_heads * k_head, a.kv_heads * v_head,
                 a.v_dim, table + t.sequence * width};
    attend(q, keys, out, nullptr, a, t.kv_head, t.first, t.count);
  }
}

template <typename T>
void attention_packed(const T* q, const T* k, const T* v, T* out, float* lse, const AttentionShape& a) {
  // The keys once into the layout of pages; the values are read where they are.
  std::vector<int64_t> first_block(a.sequences + 1, 0);
  for (int64_t s = 0; s < a.sequences; s++)
    first_block[s + 1] = first_block[s] + (a.starts[s + 1] - a.starts[s] + BLOCK - 1) / BLOCK;
  const int64_t block = a.dim * BLOCK, blocks = first_block[a.sequences];
  std::vector<T> keys_t(a.kv_heads * blocks * block);
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t h = 0; h < a.kv_heads; h++)
    for (int64_t s = 0; s < a.sequences; s++)
      for (int64_t t = a.starts[s]; t < a.starts[s + 1]; t++) {
        const int64_t at = t - a.starts[s];
        T* to = keys_t.data() + (h * blocks + first_block[s] + at / BLOCK) * block + at % BLOCK;
        for (int64_t j = 0; j < a.dim; j++) to[j * BLOCK] = k[(t * a.kv_heads + h) * a.dim + j];
      }
  const std::vector<Task> list = tasks(a);
  const int64_t v_row = a.kv_heads * a.v_dim;
#pragma omp parallel for schedule(dynamic) if (reads(list, a) > 4 * GRAIN)
  for (size_t i = 0; i < list.size(); i++) {
    const Task& t = list[i];
    Keys<T> keys{keys_t.data() + (t.kv_head * blocks + first_block[t.sequence]) * block,
                 v + a.starts[t.sequence] * v_row + t.kv_head * a.v_dim, block, BLOCK * v_row, v_row, nullptr};
    attend(q, keys, out, lse, a, t.kv_head, t.first, t.count);
  }
}

#define ATTENTION(T)                                                                                                \
  template void write_kv(const T*, const T*, T*, T*, const int32_t*, int64_t, const AttentionShape&);               \
  template void attention_paged(const T*, const T*, const T*, const int32_t*, int64_t, T*, const AttentionShape&);  \
  template void attention_packed(const T*, const T*, const T*, T*, float*, const AttentionShape&)
ATTENTION(float);
ATTENTION(bf16);

}  // namespace lockstep
