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

#include "kernels.h"
#include "math16.h"
#include "rescale.h"
#include "tile.h"

namespace lockstep {

// Up to TILE_ROWS query rows that go through the blocks together. Rows differ in position, so in visible keys.
struct Group {
  int64_t rows;
  int64_t position[TILE_ROWS];
  float m[TILE_ROWS], l[TILE_ROWS];
  int64_t low[TILE_ROWS], high[TILE_ROWS];  // visible keys within the current block
};

// Which keys of block b each row of the group sees: those from its window's start (0: none) to its own position.
inline void see(Group& g, int64_t b, int64_t window) {
  for (int64_t i = 0; i < g.rows; i++) {
    const int64_t start = window ? g.position[i] - window + 1 : 0;
    g.low[i] = std::clamp<int64_t>(start - b * BLOCK, 0, BLOCK);
    g.high[i] = std::clamp<int64_t>(g.position[i] + 1 - b * BLOCK, 0, BLOCK);
    if (g.low[i] > g.high[i]) g.low[i] = g.high[i];
  }
}

// Scores of the group against one block, in float32 [rows][BLOCK]; only panels that some row sees.
template <typename T>
void score_block(const Group& g, const float* q, int64_t dim, const T* k, float* s) {
  const int64_t first = *std::min_element(g.low, g.low + g.rows) / 16;
  const int64_t last = (*std::max_element(g.high, g.high + g.rows) + 15) / 16;
  for (int64_t i = 0; i < g.rows; i++) std::fill(s + i * BLOCK + first * 16, s + i * BLOCK + last * 16, 0.0f);
  some_rows(g.rows, dim, last - first, q, dim, 1, k + first * 16, BLOCK, 16, s + first * 16, BLOCK);
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
inline void softmax_rows(Group& g, float* s, float* out, int64_t v_dim, float softcap = 0.0f) {
  int fall[TILE_ROWS];
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

// out += p v over each row's visible keys, ascending: alone, then together where all rows see, then alone.
template <typename T>
void add_values(const Group& g, const float* p, const T* v, int64_t v_row, float* out, int64_t v_dim) {
  int64_t low = *std::max_element(g.low, g.low + g.rows), high = *std::min_element(g.high, g.high + g.rows);
  if (low >= high) low = high = BLOCK;  // no key in common: every row alone
  auto alone = [&](int64_t i, int64_t from, int64_t to) {
    if (from < to)
      some_rows(1, to - from, v_dim / 16, p + i * BLOCK + from, BLOCK, 1, v + from * v_row, v_row, 16, out + i * v_dim,
                v_dim);
  };
  for (int64_t i = 0; i < g.rows; i++) alone(i, g.low[i], std::min(low, g.high[i]));
  if (low < high)
    some_rows(g.rows, high - low, v_dim / 16, p + low, BLOCK, 1, v + low * v_row, v_row, 16, out, v_dim);
  for (int64_t i = 0; i < g.rows; i++) alone(i, std::max(high, g.low[i]), g.high[i]);
}

}  // namespace lockstep
