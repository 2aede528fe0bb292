// The inner loop of every attention kernel: a few query rows against one block of keys and values.
//
// Reduction order (the contract), for each query row, over its visible keys in ascending order:
//   score = chain of fma over the head dimension of (q scale log2 e) with k, in float32; with a soft cap c, then
//   c log2 e tanh(score / (c log2 e));
//   per block: the running maximum m becomes max(m, nearest integer to the largest visible score): integral, so
//   rescaling by 2^(m_old - m_new) is exact (rescale.h); p = 2^(score - m), exactly 0 where masked; the block's p are
//   summed in four lane vectors, (v0 + v1) + (v2 + v3), then the tree of `sum`; the row sum is l 2^(m_old - m_new) +
//   block sum;
//   output = chain of fma of p with v over the visible keys, rescaled likewise, divided by l, rounded once.
// A masked key takes part in nothing: it is skipped, not multiplied by zero, so stale pages (even NaN) cannot leak.
//
// m is AMLA's -n (arXiv 2509.25224): n = round(-max / ln 2) of natural scores. The factor that rounding leaves,
// within [2^-1/2, 2^1/2], is in the probabilities, since they are taken against m and not against the maximum.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "math16.h"
#include "rescale.h"
#include "tile.h"

namespace lockstep {

// Up to GROUP_ROWS query rows that go through a block together: their scores stay in the first-level cache. Rows differ
// in position, so in visible keys.
constexpr int64_t GROUP_ROWS = 4 * TILE_ROWS;

struct Group {
  int64_t rows;
  int64_t position[GROUP_ROWS];
  float m[GROUP_ROWS], l[GROUP_ROWS];
  int64_t low[GROUP_ROWS], high[GROUP_ROWS];  // visible keys within the current block
  bool whole;                                 // every row sees every key of it
};

// Row r of a task becomes the next of its groups.
inline void join(std::vector<Group>& groups, int64_t r, int64_t position) {
  Group& g = groups[r / GROUP_ROWS];
  const int64_t i = r % GROUP_ROWS;
  g.rows = i + 1;
  g.position[i] = position;
  g.m[i] = -INFINITY;
  g.l[i] = 0.0f;
}

// Memory that is read soon, fetched into the cache by halves while something else computes.
template <typename T>
struct Soon {
  const T* from = nullptr;
  int64_t count = 0;
  void fetch(int64_t half) const {
    for (int64_t i = half * count / 2; i < (half + 1) * count / 2; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
  }
};

// A block of keys and values. Element p of sixteen keys lies p * k_step after the start of their panel, sixteen
// elements of value t lie t * v_step after that of theirs. With scales, key t stands for k_scale[t] times what lies
// there, and value t for v_scale[t] times it. Of a block that is read as it lies in memory, the values (`later`) are
// fetched while its scores are computed, and the keys of the block after it (`next`) while its values are added.
template <typename K, typename V = K>
struct KeyBlock {
  const K* k;
  int64_t k_step, k_panel;
  const V* v;
  int64_t v_step, v_panel;
  const float *k_scale = nullptr, *v_scale = nullptr;
  Soon<V> later = {};
  Soon<K> next = {};
};

// Which keys of block b each row of the group sees: those from its window's start (0: none) to its own position.
// Returns whether any row sees one. Positions ascend with the rows.
inline bool see(Group& g, int64_t b, int64_t window) {
  const int64_t last = g.position[g.rows - 1];
  if (g.position[0] >= (b + 1) * BLOCK - 1 && (!window || last - window + 1 <= b * BLOCK)) {
    std::fill_n(g.low, g.rows, 0);
    std::fill_n(g.high, g.rows, BLOCK);
    return g.whole = true;
  }
  bool any = false;
  g.whole = true;
  for (int64_t i = 0; i < g.rows; i++) {
    const int64_t start = window ? g.position[i] - window + 1 : 0;
    g.low[i] = std::clamp<int64_t>(start - b * BLOCK, 0, BLOCK);
    g.high[i] = std::clamp<int64_t>(g.position[i] + 1 - b * BLOCK, 0, BLOCK);
    if (g.low[i] > g.high[i]) g.low[i] = g.high[i];
    any |= g.low[i] < g.high[i];
    g.whole &= g.low[i] == 0 && g.high[i] == BLOCK;
  }
  return any;
}

// Scores of the group against one block, in float32 [rows][BLOCK]. A tile computes the panels that one of its rows
// sees.
template <typename K, typename V>
void score_block(const Group& g, const float* q, int64_t dim, const KeyBlock<K, V>& x, float* s) {
  if (g.whole) return block_product<true>(dim, g.rows, BLOCK / 16, q, dim, 1, x.k, x.k_step, x.k_panel, s, BLOCK);
  for (int64_t i = 0; i < g.rows; i += TILE_ROWS) {
    const int64_t rows = std::min<int64_t>(TILE_ROWS, g.rows - i);
    const int64_t first = *std::min_element(g.low + i, g.low + i + rows) / 16;
    const int64_t last = (*std::max_element(g.high + i, g.high + i + rows) + 15) / 16;
    some_rows<true>(rows, dim, last - first, q + i * dim, dim, 1, x.k + first * x.k_panel, x.k_step, x.k_panel,
                    s + i * BLOCK + first * 16, BLOCK);
  }
}

// Sixteen lanes at a time of every row [BLOCK] times the scales of the block's keys.
inline void scale_rows(const Group& g, const float* scales, float* s) {
  for (int64_t i = 0; i < g.rows; i++)
    for (int64_t j = g.low[i] / 16 * 16; j < g.high[i]; j += 16)
      (F16::load(s + i * BLOCK + j) * F16::load(scales + j)).store(s + i * BLOCK + j);
}

// Mask one row's scores (cap them first where there is a cap) and raise its running maximum. Returns by how much the
// maximum rose, as a power of two for `times_power_of_two`: 0 where it stayed.
inline int mask_row(Group& g, int64_t i, float* s, float softcap) {
  const int64_t low = g.low[i], high = g.high[i];
  if (softcap > 0.0f)  // scores are to base 2, and so is the cap
    for (int64_t j = low / 16 * 16; j < high; j += 16) capped(F16::load(s + j), softcap * LOG2E).store(s + j);
  for (int64_t j = 0; j < low; j++) s[j] = -INFINITY;
  for (int64_t j = high; j < BLOCK; j++) s[j] = -INFINITY;
  F16 v[4];
  for (int c = 0; c < 4; c++) v[c] = F16::load(s + 16 * c);
  const float peak = std::nearbyint(largest(max(max(v[0], v[1]), max(v[2], v[3]))));
  const float old = g.m[i];
  if (!(peak > old)) return 0;
  g.m[i] = peak;
  return int(std::max(old - peak, float(LOWEST_POWER)));  // from -inf too: all is 0 then
}

// Turn one row's scores into probabilities. Returns their sum.
inline float exponentials(float m, float* s) {
  // A row all of whose scores are -inf keeps p = 0 by a finite stand-in for the maximum.
  const F16 shift = F16::all(m == -INFINITY ? 0.0f : m);
  F16 v[4];
  for (int c = 0; c < 4; c++) {
    v[c] = exp2_low(F16::load(s + 16 * c) - shift);
    v[c].store(s + 16 * c);
  }
  return sum((v[0] + v[1]) + (v[2] + v[3]));
}

// Turn the group's scores [rows][BLOCK] into probabilities and update maxima, sums and output scales. Row by row within
// a phase, so that the processor works on several rows at a time.
inline void softmax_rows(Group& g, float* s, float* out, int64_t v_dim, float softcap) {
  int fall[GROUP_ROWS];
  for (int64_t i = 0; i < g.rows; i++) fall[i] = g.low[i] < g.high[i] ? mask_row(g, i, s + i * BLOCK, softcap) : 0;
  for (int64_t i = 0; i < g.rows; i++) {
    if (fall[i] == 0) continue;
    g.l[i] = times_power_of_two(g.l[i], fall[i]);
    float* o = out + i * v_dim;
    for (int64_t j = 0; j < v_dim; j += 16) times_power_of_two(F16::load(o + j), fall[i]).store(o + j);
  }
  for (int64_t i = 0; i < g.rows; i++)
    if (g.low[i] < g.high[i]) g.l[i] += exponentials(g.m[i], s + i * BLOCK);
}

// out += p v over each row's visible keys, ascending: alone, then together where all rows of a tile see, then alone.
template <typename K, typename V>
void add_values(const Group& g, const float* p, const KeyBlock<K, V>& x, float* out, int64_t v_dim) {
  if (g.whole) return block_product(BLOCK, g.rows, v_dim / 16, p, BLOCK, 1, x.v, x.v_step, x.v_panel, out, v_dim);
  auto some = [&](int64_t i, int64_t rows, int64_t from, int64_t to) {
    if (from < to)
      some_rows(rows, to - from, v_dim / 16, p + i * BLOCK + from, BLOCK, 1, x.v + from * x.v_step, x.v_step,
                x.v_panel, out + i * v_dim, v_dim);
  };
  for (int64_t i = 0; i < g.rows; i += TILE_ROWS) {
    const int64_t end = std::min(i + TILE_ROWS, g.rows);
    int64_t low = *std::max_element(g.low + i, g.low + end), high = *std::min_element(g.high + i, g.high + end);
    if (low >= high) low = high = BLOCK;  // no key in common: every row alone
    for (int64_t r = i; r < end; r++) some(r, 1, g.low[r], std::min(low, g.high[r]));
    some(i, end - i, low, high);
    for (int64_t r = i; r < end; r++) some(r, 1, std::max(high, g.low[r]), g.high[r]);
  }
}

// All groups of a task against block b. query [rows][dim], acc [rows][v_dim], s [GROUP_ROWS][BLOCK].
template <typename K, typename V>
void attend_block(std::vector<Group>& groups, int64_t b, const AttentionShape& a, const float* query,
                  const KeyBlock<K, V>& x, float* s, float* acc) {
  for (size_t i = 0; i < groups.size(); i++) {
    if (!see(groups[i], b, a.window)) continue;
    float* out = acc + i * GROUP_ROWS * a.v_dim;
    if (i == 0) x.later.fetch(0);
    score_block(groups[i], query + i * GROUP_ROWS * a.dim, a.dim, x, s);
    if (x.k_scale) scale_rows(groups[i], x.k_scale, s);
    if (i == 0) x.later.fetch(1);
    softmax_rows(groups[i], s, out, a.v_dim, a.softcap);
    if (x.v_scale) scale_rows(groups[i], x.v_scale, s);
    if (i == 0) x.next.fetch(0);
    add_values(groups[i], s, x, out, a.v_dim);
    if (i == 0) x.next.fetch(1);
  }
}

}  // namespace lockstep
