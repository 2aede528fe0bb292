// Causal attention over blocks of 64 keys aligned to position 0: one inner loop for training, prefill and decode.
//
// Reduction order (the contract), for each query row, over its visible keys in ascending order:
//   score = chain of fma over the head dimension of (q scale log2 e) with k, in float32;
//   per block: the running maximum m becomes max(m, ceil(largest visible score)), so it is integral and rescaling
//   by 2^(m_old - m_new) is exact; p = 2^(score - m), exactly 0 where masked; the block's p are summed in four lane
//   vectors, (v0 + v1) + (v2 + v3), then the tree of `sum`; the row sum is l 2^(m_old - m_new) + block sum;
//   output = chain of fma of p with v over the visible keys, rescaled likewise, divided by l, rounded once.
// A masked key takes part in nothing: it is skipped, not multiplied by zero, so stale pages (even NaN) cannot leak.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "math16.h"
#include "tile.h"

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

// Up to TILE_ROWS query rows that go through the blocks together. Rows differ in position, so in visible keys.
struct Group {
  int64_t rows;
  int64_t position[TILE_ROWS];
  float m[TILE_ROWS], l[TILE_ROWS];
  int64_t low[TILE_ROWS], high[TILE_ROWS];  // visible keys within the current block
};

// Scores of the group against one block, in float32 [rows][BLOCK]; only panels that some row sees.
template <typename T>
void score_block(const Group& g, const float* q, int64_t dim, const T* k, float* s) {
  const int64_t first = *std::min_element(g.low, g.low + g.rows) / 16;
  const int64_t last = (*std::max_element(g.high, g.high + g.rows) + 15) / 16;
  for (int64_t i = 0; i < g.rows; i++) std::fill(s + i * BLOCK + first * 16, s + i * BLOCK + last * 16, 0.0f);
  some_rows(g.rows, dim, last - first, q, dim, 1, k + first * 16, BLOCK, 16, s + first * 16, BLOCK);
}

// Turn one row's scores into probabilities and update its maximum, sum and output scale.
void softmax_row(Group& g, int64_t i, float* s, float* out, int64_t dim) {
  const int64_t low = g.low[i], high = g.high[i];
  if (low >= high) return;
  for (int64_t j = 0; j < low; j++) s[j] = -INFINITY;
  for (int64_t j = high; j < BLOCK; j++) s[j] = -INFINITY;
  F16 v[4];
  for (int c = 0; c < 4; c++) v[c] = F16::load(s + 16 * c);
  const float peak = std::ceil(largest(max(max(v[0], v[1]), max(v[2], v[3]))));
  const float m = peak > g.m[i] ? peak : g.m[i];
  // A row all of whose scores are -inf keeps p = 0 by a finite stand-in for the maximum.
  const F16 shift = F16::all(m == -INFINITY ? 0.0f : m);
  for (int c = 0; c < 4; c++) {
    v[c] = exp2(v[c] - shift);
    v[c].store(s + 16 * c);
  }
  const float block_sum = sum((v[0] + v[1]) + (v[2] + v[3]));
  if (m != g.m[i]) {
    const float rescale = g.m[i] == -INFINITY ? 0.0f : std::ldexp(1.0f, int(std::max(g.m[i] - m, -200.0f)));
    g.l[i] *= rescale;
    for (int64_t j = 0; j < dim; j += 16) (F16::load(out + j) * F16::all(rescale)).store(out + j);
    g.m[i] = m;
  }
  g.l[i] += block_sum;
}

// out += p v over each row's visible keys, ascending: alone, then together where all rows see, then alone.
template <typename T>
void add_values(const Group& g, const float* p, const T* v, int64_t v_row, float* out, int64_t dim) {
  int64_t low = *std::max_element(g.low, g.low + g.rows), high = *std::min_element(g.high, g.high + g.rows);
  if (low >= high) low = high = BLOCK;  // no key in common: every row alone
  auto alone = [&](int64_t i, int64_t from, int64_t to) {
    if (from < to)
      some_rows(1, to - from, dim / 16, p + i * BLOCK + from, BLOCK, 1, v + from * v_row, v_row, 16, out + i * dim, dim);
  };
  for (int64_t i = 0; i < g.rows; i++) alone(i, g.low[i], std::min(low, g.high[i]));
  if (low < high)
    some_rows(g.rows, high - low, dim / 16, p + low, BLOCK, 1, v + low * v_row, v_row, 16, out, dim);
  for (int64_t i = 0; i < g.rows; i++) alone(i, std::max(high, g.low[i]), g.high[i]);
}

// Rows first .. first + count - 1 of one kv head's query heads: (position, head) with the heads innermost.
template <typename T>
void attend(const T* q, const Keys<T>& keys, T* out, float* lse, const AttentionShape& a, int64_t kv_head,
            int64_t first, int64_t count) {
  const int64_t per = a.heads / a.kv_heads, total = count * per, dim = a.dim;
  std::vector<float> query(TILE_ROWS * dim), acc(TILE_ROWS * dim), s(TILE_ROWS * BLOCK);
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
      for (int64_t i = 0; i < g.rows; i++) {
        const int64_t start = a.window ? g.position[i] - a.window + 1 : 0;
        g.low[i] = std::clamp<int64_t>(start - b * BLOCK, 0, BLOCK);
        g.high[i] = std::clamp<int64_t>(g.position[i] + 1 - b * BLOCK, 0, BLOCK);
        if (g.low[i] > g.high[i]) g.low[i] = g.high[i];
      }
      score_block(g, query.data(), dim, keys.k(b), s.data());
      for (int64_t i = 0; i < g.rows; i++) softmax_row(g, i, s.data() + i * BLOCK, acc.data() + i * dim, dim);
      add_values(g, s.data(), keys.v(b), keys.v_row, acc.data(), dim);
    }
    for (int64_t i = 0; i < g.rows; i++) {
      for (int64_t j = 0; j < dim; j += 16)
        (F16::load(acc.data() + i * dim + j) / F16::all(g.l[i])).store(out + row(i) * dim + j);
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
        std::copy_n(v + (t * a.kv_heads + h) * a.dim, a.dim,
                    v_pages + ((page * a.kv_heads + h) * BLOCK + slot) * a.dim);
      }
}

template <typename T>
void attention_paged(const T* q, const T* k_pages, const T* v_pages, const int32_t* table, int64_t width, T* out,
                     const AttentionShape& a) {
  const std::vector<Task> list = tasks(a);
  const int64_t page = a.kv_heads * a.dim * BLOCK;
#pragma omp parallel for schedule(dynamic) if (reads(list, a) > 4 * GRAIN)
  for (size_t i = 0; i < list.size(); i++) {
    const Task& t = list[i];
    const int64_t head = t.kv_head * a.dim * BLOCK;
    Keys<T> keys{k_pages + head, v_pages + head, page, page, a.dim, table + t.sequence * width};
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
  const int64_t v_row = a.kv_heads * a.dim;
#pragma omp parallel for schedule(dynamic) if (reads(list, a) > 4 * GRAIN)
  for (size_t i = 0; i < list.size(); i++) {
    const Task& t = list[i];
    Keys<T> keys{keys_t.data() + (t.kv_head * blocks + first_block[t.sequence]) * block,
                 v + a.starts[t.sequence] * v_row + t.kv_head * a.dim, block, BLOCK * v_row, v_row, nullptr};
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
