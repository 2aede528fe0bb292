// The gradient of causal attention over whole sequences, recomputing probabilities from the saved log-sum-exp.
//
// Order (the contract): a task is one (sequence, kv head). Blocks of 64 keys ascend; within a block, runs of query
// rows (position, then head of the group) ascend. dq is a chain over the keys, dk and dv are chains over the query
// rows, all float32, rounded once at the end. No task writes what another reads or writes.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "math16.h"
#include "tile.h"

namespace lockstep {

namespace {

constexpr int64_t RUN = 48;  // query rows taken together: their p and ds stay in the first-level cache

struct Scratch {
  std::vector<float> q, d_out, dq;    // [rows of the sequence, dim or v_dim]; q scaled to base-2 scores
  std::vector<float> delta, lse;      // [rows of the sequence]
  std::vector<float> kt, vt, k;       // [dim][BLOCK], [v_dim][BLOCK], [BLOCK][dim]
  std::vector<float> dk, dv, p, ds;   // [BLOCK][dim], [BLOCK][v_dim], [RUN][BLOCK] twice
};

template <typename T>
void load_block(const T* x, int64_t row, int64_t count, int64_t dim, float* transposed, float* plain) {
  std::fill(transposed, transposed + dim * BLOCK, 0.0f);
  for (int64_t t = 0; t < count; t++)
    for (int64_t j = 0; j < dim; j++) {
      transposed[j * BLOCK + t] = to_float(x[t * row + j]);
      if (plain) plain[t * dim + j] = to_float(x[t * row + j]);
    }
}

// p = 2^(score - lse) and ds = p (dp - delta) for one row; zero where the key is masked. With a soft cap (to base 2; 0:
// none) score is the capped one, and ds goes on through its slope.
void row_gradients(float* p, float* dp, float lse, float delta, float cap, int64_t low, int64_t high) {
  for (int64_t j = 0; j < BLOCK; j += 16) {
    F16 score = F16::load(p + j);
    if (cap > 0.0f) score = capped(score, cap);
    F16 e = exp2_low(score - F16::all(lse));  // a masked score may be above lse: it is overwritten below
    F16 d = e * (F16::load(dp + j) - F16::all(delta));
    if (cap > 0.0f) d = d * capped_slope(score, cap);
    e.store(p + j);
    d.store(dp + j);
  }
  for (int64_t j = 0; j < low; j++) p[j] = dp[j] = 0.0f;
  for (int64_t j = high; j < BLOCK; j++) p[j] = dp[j] = 0.0f;
}

void run_block(Scratch& w, const AttentionShape& a, int64_t first, int64_t rows, int64_t base) {
  const int64_t dim = a.dim, v_dim = a.v_dim, per = a.heads / a.kv_heads, window = a.window;
  std::fill(w.p.begin(), w.p.begin() + rows * BLOCK, 0.0f);
  std::fill(w.ds.begin(), w.ds.begin() + rows * BLOCK, 0.0f);
  multiply(dim, rows, BLOCK / 16, w.q.data() + first * dim, dim, 1, w.kt.data(), BLOCK, 16, w.p.data(), BLOCK);
  multiply(v_dim, rows, BLOCK / 16, w.d_out.data() + first * v_dim, v_dim, 1, w.vt.data(), BLOCK, 16, w.ds.data(),
           BLOCK);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t position = (first + i) / per;
    const int64_t low = window ? std::clamp<int64_t>(position - window + 1 - base, 0, BLOCK) : 0;
    const int64_t high = std::clamp<int64_t>(position + 1 - base, 0, BLOCK);
    row_gradients(w.p.data() + i * BLOCK, w.ds.data() + i * BLOCK, w.lse[first + i], w.delta[first + i],
                  a.softcap * LOG2E, low, high);
  }
  multiply(BLOCK, rows, dim / 16, w.ds.data(), BLOCK, 1, w.k.data(), dim, 16, w.dq.data() + first * dim, dim);
  multiply(rows, BLOCK, dim / 16, w.ds.data(), 1, BLOCK, w.q.data() + first * dim, dim, 16, w.dk.data(), dim);
  multiply(rows, BLOCK, v_dim / 16, w.p.data(), 1, BLOCK, w.d_out.data() + first * v_dim, v_dim, 16, w.dv.data(),
           v_dim);
}

template <typename T>
void store_rows(const std::vector<float>& from, float scale, T* to, int64_t row, int64_t rows, int64_t dim) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < dim; j += 16) (F16::load(&from[i * dim + j]) * F16::all(scale)).store(to + i * row + j);
}

}  // namespace

template <typename T>
void attention_backward(const T* q, const T* k, const T* v, const T* out, const float* lse, const T* d_out, T* dq,
                        T* dk, T* dv, const AttentionShape& a) {
  const int64_t per = a.heads / a.kv_heads, dim = a.dim, v_dim = a.v_dim;
  const int64_t k_row = a.kv_heads * dim, v_row = a.kv_heads * v_dim;
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (int64_t s = 0; s < a.sequences; s++)
    for (int64_t h = 0; h < a.kv_heads; h++) {
      const int64_t start = a.starts[s], n = a.starts[s + 1] - start, rows = n * per;
      Scratch w;
      for (auto* x : {&w.q, &w.dq}) x->assign(rows * dim, 0.0f);
      w.d_out.assign(rows * v_dim, 0.0f);
      for (auto* x : {&w.delta, &w.lse}) x->resize(rows);
      for (auto* x : {&w.kt, &w.k, &w.dk}) x->resize(BLOCK * dim);
      for (auto* x : {&w.vt, &w.dv}) x->resize(BLOCK * v_dim);
      for (auto* x : {&w.p, &w.ds}) x->resize(RUN * BLOCK);
      auto at = [&](int64_t r) { return (start + r / per) * a.heads + h * per + r % per; };
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
      for (int64_t base = 0; base < n; base += BLOCK) {
        const int64_t count = std::min(BLOCK, n - base);
        const int64_t k_at = (start + base) * k_row + h * dim, v_at = (start + base) * v_row + h * v_dim;
        std::fill(w.k.begin(), w.k.end(), 0.0f);
        load_block(k + k_at, k_row, count, dim, w.kt.data(), w.k.data());
        load_block(v + v_at, v_row, count, v_dim, w.vt.data(), nullptr);
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
}

template void attention_backward(const float*, const float*, const float*, const float*, const float*, const float*,
                                 float*, float*, float*, const AttentionShape&);
template void attention_backward(const bf16*, const bf16*, const bf16*, const bf16*, const float*, const bf16*, bf16*,
                                 bf16*, bf16*, const AttentionShape&);

}  // namespace lockstep
