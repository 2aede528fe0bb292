// The tasks of attention over blocks of keys, and the walk of one task through its blocks.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attend.h"
#include "kernels.h"
#include "team.h"

namespace lockstep {

constexpr int64_t MOST_ROWS = 8 * GROUP_ROWS;  // query rows of a task: their sums stay in the second-level cache

struct Task {
  int64_t sequence, kv_head, first, count;
};

// Blocks of keys that some row of a task sees: from the first to before the last.
inline int64_t first_block(const AttentionShape& a, const Task& t) {
  return a.window ? std::max<int64_t>(0, a.positions[t.first] - a.window + 1) / BLOCK : 0;
}
inline int64_t end_block(const AttentionShape& a, const Task& t) {
  return a.positions[t.first + t.count - 1] / BLOCK + 1;
}

// The rows of a task, (position, query head of the kv head) with the heads innermost. block(b, keys): block b of the
// task's keys and values, of which the first `keys` are visible to some row.
template <typename T, typename Block>
void attend(const T* q, T* out, float* lse, const AttentionShape& a, const Task& t, Block block) {
  const int64_t per = a.heads / a.kv_heads, rows = t.count * per, dim = a.dim, v_dim = a.v_dim;
  const std::unique_ptr<float[]> query(new float[rows * dim]), s(new float[GROUP_ROWS * BLOCK]);
  std::vector<float> acc(rows * v_dim, 0.0f);
  std::vector<Group> groups((rows + GROUP_ROWS - 1) / GROUP_ROWS);
  auto row = [&](int64_t r) { return (t.first + r / per) * a.heads + t.kv_head * per + r % per; };
  for (int64_t r = 0; r < rows; r++) {
    join(groups, r, a.positions[t.first + r / per]);
    for (int64_t j = 0; j < dim; j += 16)
      (F16::load(q + row(r) * dim + j) * F16::all(a.scale * LOG2E)).store(query.get() + r * dim + j);
  }
  const int64_t end = a.positions[t.first + t.count - 1] + 1;
  for (int64_t b = first_block(a, t); b < end_block(a, t); b++)
    attend_block(groups, b, a, query.get(), block(b, std::min(BLOCK, end - b * BLOCK)), s.get(), acc.data());
  for (int64_t r = 0; r < rows; r++) {
    const Group& g = groups[r / GROUP_ROWS];
    const float m = g.m[r % GROUP_ROWS], l = g.l[r % GROUP_ROWS];
    for (int64_t j = 0; j < v_dim; j += 16)
      (F16::load(acc.data() + r * v_dim + j) / F16::all(l)).store(out + row(r) * v_dim + j);
    if (lse) lse[row(r)] = m + float(std::log2(double(l)));
  }
}

// Key elements that all tasks read, about: whether more than one thread is worth waking.
inline int64_t reads(const std::vector<Task>& list, const AttentionShape& a) {
  int64_t sum = 0;
  for (const Task& t : list) sum += t.count * (a.positions[t.first + t.count - 1] + 1) * a.dim;
  return sum * (a.heads / a.kv_heads);
}

// Every (sequence, kv head, run of query positions), the longest walks first so that threads end together. A run is as
// long as leaves every thread several: a block of keys is laid out once for all its rows.
inline std::vector<Task> tasks(const AttentionShape& a) {
  const int64_t per = a.heads / a.kv_heads, share = a.tokens * a.heads / (8 * threads());
  const int64_t run = std::max<int64_t>(1, std::clamp(share, GROUP_ROWS, MOST_ROWS) / per);
  std::vector<Task> list;
  for (int64_t s = 0; s < a.sequences; s++)
    for (int64_t first = a.starts[s]; first < a.starts[s + 1]; first += run)
      for (int64_t h = 0; h < a.kv_heads; h++)
        list.push_back({s, h, first, std::min<int64_t>(run, a.starts[s + 1] - first)});
  std::stable_sort(list.begin(), list.end(), [&](const Task& x, const Task& y) {
    return a.positions[x.first + x.count - 1] > a.positions[y.first + y.count - 1];
  });
  return list;
}

// body(sequence, kv head) for all of them; every element of a token's head takes so long as `cost` of a stream.
template <typename Body>
void each_head(const AttentionShape& a, int64_t cost, Body body) {
  const int64_t count = a.sequences * a.kv_heads;
  each(count, count ? cost * a.tokens * a.dim / a.sequences : 0,
       [&](int64_t i) { body(i / a.kv_heads, i % a.kv_heads); });
}

inline KeyBlock<float> panel_block(const float* k, const float* v, const AttentionShape& a) {
  return {k, 16, a.dim * 16, v, 16, BLOCK * 16};
}

}  // namespace lockstep
