// Absorbed attention over pages of latents (multi-head latent attention, arXiv 2405.04434): a query of every head has
// the latent's width, the latent is the key of all heads, and its first v_dim elements are their value.
//
// Every row goes through the inner loop of attend.h, so its bits are those of `attention_packed` with one key head
// over the same latents. A page holds its latents as rows once; a block is turned round for the scores in scratch that
// stays in the second-level cache, once for all rows of a task: heads of one sequence's neighbouring positions.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attend.h"
#include "latent.h"
#include "panels.h"
#include "team.h"

namespace lockstep {

namespace {

constexpr int64_t HEADS = 64;   // heads of a task: with 128, one sequence's decode has work for two threads
constexpr int64_t ROWS = 96;    // query rows of a task, about: their sums stay in the second-level cache

struct Task {
  int64_t sequence, first, count, head, heads;
};

std::vector<Task> tasks(const AttentionShape& a) {
  std::vector<Task> list;
  for (int64_t h = 0; h < a.heads; h += HEADS) {
    const int64_t heads = std::min(HEADS, a.heads - h), run = std::max<int64_t>(1, ROWS / heads);
    for (int64_t s = 0; s < a.sequences; s++)
      for (int64_t first = a.starts[s]; first < a.starts[s + 1]; first += run)
        list.push_back({s, first, std::min<int64_t>(run, a.starts[s + 1] - first), h, heads});
  }
  std::stable_sort(list.begin(), list.end(), [&](const Task& x, const Task& y) {
    return a.positions[x.first + x.count - 1] > a.positions[y.first + y.count - 1];
  });
  return list;
}

template <typename T>
void attend_latents(const T* q, const T* pages, const int32_t* table, T* out, const AttentionShape& a, const Task& t) {
  const int64_t dim = a.dim, v_dim = a.v_dim, total = t.count * t.heads;
  const int64_t end = a.positions[t.first + t.count - 1] + 1;
  const std::unique_ptr<float[]> turned(new float[dim * BLOCK]);
  std::vector<float> query(total * dim), acc(total * v_dim, 0.0f), s(GROUP_ROWS * BLOCK);
  std::vector<Group> groups((total + GROUP_ROWS - 1) / GROUP_ROWS);
  auto row = [&](int64_t r) { return (t.first + r / t.heads) * a.heads + t.head + r % t.heads; };
  for (int64_t r = 0; r < total; r++) {
    join(groups, r, a.positions[t.first + r / t.heads]);
    for (int64_t j = 0; j < dim; j += 16)
      (F16::load(q + row(r) * dim + j) * F16::all(a.scale * LOG2E)).store(query.data() + r * dim + j);
  }
  for (int64_t b = 0; b * BLOCK < end; b++) {
    const T* latents = pages + int64_t(table[b]) * BLOCK * dim;
    turned_panels(latents, dim, std::min(BLOCK, end - b * BLOCK), dim, turned.get());
    const KeyBlock<float, T> block{turned.get(), 16, dim * 16, latents, dim, 16};
    attend_block(groups, b, a, query.data(), block, s.data(), acc.data());
  }
  for (int64_t r = 0; r < total; r++)
    for (int64_t j = 0; j < v_dim; j += 16)
      (F16::load(acc.data() + r * v_dim + j) / F16::all(groups[r / GROUP_ROWS].l[r % GROUP_ROWS]))
          .store(out + row(r) * v_dim + j);
}

}  // namespace

template <typename T>
void write_latents(const T* latents, T* pages, const int32_t* table, int64_t width, const AttentionShape& a) {
  for (int64_t s = 0; s < a.sequences; s++)
    for (int64_t t = a.starts[s]; t < a.starts[s + 1]; t++) {
      const int64_t page = table[s * width + a.positions[t] / BLOCK], slot = a.positions[t] % BLOCK;
      std::copy_n(latents + t * a.dim, a.dim, pages + (page * BLOCK + slot) * a.dim);
    }
}

template <typename T>
void attention_latent(const T* q, const T* pages, const int32_t* table, int64_t width, T* out,
                      const AttentionShape& a) {
  const std::vector<Task> list = tasks(a);
  each_task(int64_t(list.size()), a.tokens * a.heads * a.dim > GRAIN / 4, [&](int64_t i) {
    attend_latents(q, pages, table + list[i].sequence * width, out, a, list[i]);
  });
}

#define LATENT(T)                                                                                \
  template void write_latents(const T*, T*, const int32_t*, int64_t, const AttentionShape&);     \
  template void attention_latent(const T*, const T*, const int32_t*, int64_t, T*, const AttentionShape&)
LATENT(float);
LATENT(bf16);

}  // namespace lockstep
