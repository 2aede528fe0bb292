// The gradient of causal attention over whole sequences, recomputing probabilities from the saved log-sum-exp.
//
// Order (the contract): a task is one (sequence, kv head). Blocks of 64 keys ascend; within a block, runs of query
// rows (position, then head of the group) ascend. dq is a chain over the keys, dk and dv are chains over the query
// rows, all float32, rounded once at the end. Of a block, a run of query rows takes the keys in whole sixteens, from
// the first that one of its rows sees to the last; a key among them that a row does not see adds a product with an
// exact zero to its chains. No task writes what another reads or writes.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "math16.h"
#include "panels.h"
#include "team.h"
#include "tile.h"

namespace lockstep {

namespace {

constexpr int64_t RUN = 48;  // query rows taken together: their p and ds stay in the first-level cache

struct Scratch {
  std::vector<float> q, d_out, dq;   // [rows of the sequence, dim or v_dim]; q scaled to base-2 scores
  std::vector<float> delta, lse;     // [rows of the sequence]
  std::vector<float> kt, vt, k;      // panels of a block: turned, turned, plain
  std::vector<float> dk, dv, p, ds;  // [BLOCK][dim], [BLOCK][v_dim], [RUN][BLOCK] twice

  explicit Scratch(const AttentionShape& a) : p(RUN * BLOCK), ds(RUN * BLOCK) {
    for (auto* x : {&kt, &k, &dk}) x->resize(BLOCK * a.dim);
    for (auto* x : {&vt, &dv}) x->resize(BLOCK * a.v_dim);
  }
};

// p = 2^(score - lse) and ds = p (dp - delta) for one row; zero where the key is masked. With a soft cap (to base 2; 0:
// none) score is the capped one, and ds goes on through its slope.
void row_gradients(float* p, float* dp, float lse, float delta, float cap, int64_t low, int64_t high) {
  const F16 log_z = F16::all(lse), shift = F16::all(delta);
  for (int64_t j = low / 16 * 16; j < high; j += 16) {
    F16 score = F16::load(p + j);
    if (cap > 0.0f) score = capped(score, cap);
    F16 e = exp2_low(score - log_z);  // a masked score may be above lse: it is overwritten
    F16 d = e * (F16::load(dp + j) - shift);
    if (cap > 0.0f) d = d * capped_slope(score, cap);
    e.store(p + j);
    d.store(dp + j);
  }
}

// One run of query rows against one block.
void run_block(Scratch& w, const AttentionShape& a, int64_t first, int64_t rows, int64_t base) {
  const int64_t dim = a.dim, v_dim = a.v_dim, per = a.heads / a.kv_heads;
  auto low = [&](int64_t r) {
    return a.window ? std::clamp<int64_t>(r / per - a.window + 1 - base, 0, BLOCK) : int64_t(0);
  };
  auto high = [&](int64_t r) { return std::clamp<int64_t>(r / per + 1 - base, 0, BLOCK); };
  const int64_t from = low(first) / 16 * 16, to = (high(first + rows - 1) + 15) / 16 * 16, keys = to - from;
  const float *q = w.q.data() + first * dim, *d_out = w.d_out.data() + first * v_dim;
  float *p = w.p.data() + from, *ds = w.ds.data() + from;
  block_product<true>(dim, rows, keys / 16, q, dim, 1, w.kt.data() + from * dim, 16, dim * 16, p, BLOCK);
  block_product<true>(v_dim, rows, keys / 16, d_out, v_dim, 1, w.vt.data() + from * v_dim, 16, v_dim * 16, ds, BLOCK);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t l = low(first + i), h = std::max(l, high(first + i));
    float *pi = w.p.data() + i * BLOCK, *dsi = w.ds.data() + i * BLOCK;
    row_gradients(pi, dsi, w.lse[first + i], w.delta[first + i], a.softcap * LOG2E, l, h);
    for (int64_t j = from; j < l; j++) pi[j] = dsi[j] = 0.0f;
    for (int64_t j = h; j < to; j++) pi[j] = dsi[j] = 0.0f;
  }
  block_product(keys, rows, dim / 16, ds, BLOCK, 1, w.k.data() + from * 16, 16, BLOCK * 16, w.dq.data() + first * dim,
                dim);
  block_product(rows, keys, dim / 16, ds, 1, BLOCK, q, dim, 16, w.dk.data() + from * dim, dim);
  block_product(rows, keys, v_dim / 16, p, 1, BLOCK, d_out, v_dim, 16, w.dv.data() + from * v_dim, v_dim);
}

template <typename T>
void store_rows(const std::vector<float>& from, float scale, T* to, int64_t row, int64_t rows, int64_t dim) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < dim; j += 16) (F16::load(&from[i * dim + j]) * F16::all(scale)).store(to + i * row + j);
}

// What is read of every query row, as float32; dq from zero.
template <typename T, typename Row>
void load_rows(const T* q, const T* out, const float* lse, const T* d_out, const AttentionShape& a, int64_t rows,
               Row at, Scratch& w) {
  const int64_t dim = a.dim, v_dim = a.v_dim;
  w.q.resize(rows * dim);
  w.d_out.resize(rows * v_dim);
  w.dq.assign(rows * dim, 0.0f);
  for (auto* x : {&w.delta, &w.lse}) x->resize(rows);
  for (int64_t r = 0; r < rows; r++) {
    F16 delta = F16::zero();
    for (int64_t j = 0; j < dim; j += 16)
      (F16::load(q + at(r) * dim + j) * F16::all(a.scale * LOG2E)).store(&w.q[r * dim + j]);
    for (int64_t j = 0; j < v_dim; j += 16) {
      const int64_t from = at(r) * v_dim + j;
      F16 g = F16::load(d_out + from);
      g.store(&w.d_out[r * v_dim + j]);
      delta = fma(g, F16::load(out + from), delta);
    }
    w.delta[r] = sum(delta);
    w.lse[r] = lse[at(r)];
  }
}

// The gradients of kv head h of sequence s and of its query heads.
template <typename T>
void head_gradients(const T* q, const T* k, const T* v, const T* out, const float* lse, const T* d_out, T* dq, T* dk,
                    T* dv, const AttentionShape& a, int64_t s, int64_t h, Scratch& w) {
  const int64_t per = a.heads / a.kv_heads, dim = a.dim, v_dim = a.v_dim;
  const int64_t k_row = a.kv_heads * dim, v_row = a.kv_heads * v_dim;
  const int64_t start = a.starts[s], n = a.starts[s + 1] - start, rows = n * per;
  auto at = [&](int64_t r) { return (start + r / per) * a.heads + h * per + r % per; };
  load_rows(q, out, lse, d_out, a, rows, at, w);
  for (int64_t base = 0; base < n; base += BLOCK) {
    const int64_t count = std::min(BLOCK, n - base);
    const int64_t k_at = (start + base) * k_row + h * dim, v_at = (start + base) * v_row + h * v_dim;
    turned_panels(k + k_at, k_row, count, dim, w.kt.data());
    plain_panels(k + k_at, k_row, count, dim, w.k.data());
    turned_panels(v + v_at, v_row, count, v_dim, w.vt.data());
    std::fill(w.dk.begin(), w.dk.end(), 0.0f);
    std::fill(w.dv.begin(), w.dv.end(), 0.0f);
    const int64_t last = a.window ? std::min(n, base + BLOCK + a.window - 1) : n;  // positions that see the block
    for (int64_t first = base * per; first < last * per; first += RUN)
      run_block(w, a, first, std::min(RUN, last * per - first), base);
    // Scores were q k scale log2 e: d(score)/dk brings q scale, that is w.q ln 2.
    store_rows(w.dk, 1.0f / LOG2E, dk + k_at, k_row, count, dim);
    store_rows(w.dv, 1.0f, dv + v_at, v_row, count, v_dim);
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < dim; j += 16)
      (F16::load(&w.dq[r * dim + j]) * F16::all(a.scale)).store(dq + at(r) * dim + j);
}

}  // namespace

template <typename T>
void attention_backward(const T* q, const T* k, const T* v, const T* out, const float* lse, const T* d_out, T* dq,
                        T* dk, T* dv, const AttentionShape& a) {
  std::vector<int64_t> order(a.sequences);  // the longest first, so that threads end together
  std::iota(order.begin(), order.end(), 0);
  auto length = [&](int64_t s) { return a.starts[s + 1] - a.starts[s]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return length(x) > length(y); });
  in_team(a.sequences * a.kv_heads, true, [&](Tasks& tasks) {
    int64_t i = tasks.take();
    if (i < 0) return;
    for (Scratch w(a); i >= 0; i = tasks.take())
      head_gradients(q, k, v, out, lse, d_out, dq, dk, dv, a, order[i / a.kv_heads], i % a.kv_heads, w);
  });
}

template void attention_backward(const float*, const float*, const float*, const float*, const float*, const float*,
                                 float*, float*, float*, const AttentionShape&);
template void attention_backward(const bf16*, const bf16*, const bf16*, const bf16*, const float*, const bf16*, bf16*,
                                 bf16*, bf16*, const AttentionShape&);

}  // namespace lockstep
