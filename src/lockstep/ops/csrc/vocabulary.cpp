// Operators on the vocabulary: log-softmax, entropy, the cross-entropy gradient, the embedding and its gradient.
//
// Reduction order (the contract): the sum of exponentials of a row is 64 chains (chain j adds elements j, j + 64,
// ... in ascending order), combined as (c0 + c1) + (c2 + c3) over their four vectors and then by the tree of `sum`.
// A row of the embedding gradient is one chain over the tokens in ascending order, in float32, rounded once.
// A vocabulary in segments has such a result for each (`ops/cut_vocabulary.py` says how they are joined).
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "math16.h"
#include "team.h"

namespace lockstep {

namespace {

// The largest element. Which of equal zeros it is changes no result.
float row_maximum(const float* x, int64_t n) {
  const float low = -INFINITY;
  F16 top[4] = {F16::all(low), F16::all(low), F16::all(low), F16::all(low)};
  int64_t j = 0;
  for (; j + 64 <= n; j += 64)
    for (int c = 0; c < 4; c++) top[c] = max(F16::load(x + j + 16 * c), top[c]);
  for (; j < n; j += 16) top[0] = max(load_part(x + j, n - j, low), top[0]);
  return largest(max(max(top[0], top[1]), max(top[2], top[3])));
}

// The sum of f over a row, 64 chains and their tree. f(chain, x) adds to a chain what sixteen elements x contribute;
// elements behind the row's end are -inf.
template <typename F>
float sum_of_chains(const float* x, int64_t n, F f) {
  F16 chains[4] = {F16::zero(), F16::zero(), F16::zero(), F16::zero()};
  int64_t j = 0;
  for (; j + 64 <= n; j += 64)
    for (int c = 0; c < 4; c++) chains[c] = f(chains[c], F16::load(x + j + 16 * c));
  for (int c = 0; c < 4 && j < n; c++, j += 16) chains[c] = f(chains[c], load_part(x + j, n - j, -INFINITY));
  return sum((chains[0] + chains[1]) + (chains[2] + chains[3]));
}

float row_log_sum_exp(const float* x, int64_t n) {
  const float peak = row_maximum(x, n);
  const float total = sum_of_chains(x, n, [peak](F16 s, F16 v) { return s + exp_low(v - F16::all(peak)); });
  return peak + float(std::log(double(total)));
}

// Where segment s of n elements begins: the first n % segments have one more than the others.
int64_t segment_start(int64_t n, int64_t segments, int64_t s) { return n / segments * s + std::min(n % segments, s); }

}  // namespace

void log_sum_exp(const float* logits, float* lse, int64_t rows, int64_t vocabulary, int64_t segments) {
  each(rows, vocabulary, [&](int64_t i) {
    for (int64_t s = 0; s < segments; s++) {
      const int64_t first = segment_start(vocabulary, segments, s), end = segment_start(vocabulary, segments, s + 1);
      lse[i * segments + s] = row_log_sum_exp(logits + i * vocabulary + first, end - first);
    }
  });
}

void log_softmax(const float* logits, float* y, int64_t rows, int64_t vocabulary) {
  each(rows, vocabulary, [&](int64_t i) {
    const float* x = logits + i * vocabulary;
    const F16 lse = F16::all(row_log_sum_exp(x, vocabulary));
    for (int64_t j = 0; j < vocabulary; j += 16)
      store_part(load_part(x + j, vocabulary - j) - lse, y + i * vocabulary + j, vocabulary - j);
  });
}

// The sum goes as that of `row_log_sum_exp` does; a logit of -inf adds an exact zero.
void entropies(const float* logits, const float* lse, float* y, int64_t rows, int64_t vocabulary, int64_t segments) {
  each(rows, vocabulary, [&](int64_t i) {
    const F16 log_z = F16::all(lse[i]);
    for (int64_t s = 0; s < segments; s++) {
      const int64_t first = segment_start(vocabulary, segments, s), end = segment_start(vocabulary, segments, s + 1);
      y[i * segments + s] = sum_of_chains(logits + i * vocabulary + first, end - first, [log_z](F16 sum, F16 v) {
        const F16 log_p = v - log_z;
        return sum - exp_low(log_p) * max(F16::all(-1000.0f), log_p);
      });
    }
  });
}

void softcap(const float* logits, float cap, float* y, int64_t count) {
  each_sixteen(count, 1, [=](int64_t j, auto n) INLINE {
    store_part(capped(load_part(logits + j, n), cap), y + j, n);
  });
}

template <typename T>
void cross_entropy_backward(const float* logits, const float* lse, const int64_t* targets, const float* weights,
                            float z_loss, float softcap, T* d_logits, int64_t stride, int64_t rows,
                            int64_t vocabulary, int64_t first) {
  each(rows, vocabulary, [&](int64_t i) {
    const float* x = logits + i * vocabulary;
    T* d = d_logits + i * stride;
    if (targets[i] < 0) {
      for (int64_t j = 0; j < vocabulary; j += 16) store_part(F16::zero(), d + j, vocabulary - j);
      return;
    }
    const int64_t t = targets[i] - first;
    const bool here = t >= 0 && t < vocabulary;
    const float chosen = here ? x[t] : 0.0f;  // now: d may lie where x does
    const F16 log_z = F16::all(lse[i]);
    const float factor = weights[i] * (1.0f + 2.0f * z_loss * lse[i]);
    for (int64_t j = 0; j < vocabulary; j += 16) {
      const F16 logit = load_part(x + j, vocabulary - j);
      F16 g = exp_low(logit - log_z) * F16::all(factor);
      if (softcap > 0.0f) g = g * capped_slope(logit, softcap);
      store_part(g, d + j, vocabulary - j);
    }
    if (!here) return;
    const float p = factor * std::exp(chosen - lse[i]), share = softcap > 0.0f ? chosen / softcap : 0.0f;
    from_float((p - weights[i]) * (1.0f - share * share), d + t);
  });
}

template <typename T, typename O>
void scaled(const T* x, float scale, O* y, int64_t count) {
  if (static_cast<const void*>(x) == static_cast<const void*>(y) && scale == 1.0f) return;
  const F16 factor = F16::all(scale);
  each_sixteen(count, 1, [=](int64_t j, auto n) INLINE {
    store_part(load_part(x + j, n) * factor, y + j, n);
  });
}

template <typename S, typename T>
void embedding(const int64_t* tokens, const S* weight, float scale, T* y, int64_t rows, int64_t d, int64_t first,
               int64_t held) {
  const F16 factor = F16::all(scale), none = F16::all(-0.0f);
  each(rows, d, [&](int64_t i) {
    const int64_t token = tokens[i] - first;
    T* to = y + i * d;
    if (token < 0 || token >= held) {
      for (int64_t j = 0; j < d; j += 16) store_part(none, to + j, d - j);
      return;
    }
    const S* from = weight + token * d;
    if constexpr (std::is_same_v<S, T>)
      if (scale == 1.0f) {
        std::copy_n(from, d, to);
        return;
      }
    for (int64_t j = 0; j < d; j += 16) {
      store_part(load_part(from + j, d - j), to + j, d - j);
      if (scale != 1.0f) store_part(load_part(to + j, d - j) * factor, to + j, d - j);
    }
  });
}

template <typename T, typename O>
void embedding_backward(const int64_t* tokens, const T* dy, float scale, O* dw, int64_t rows, int64_t d,
                        int64_t first_token, int64_t vocabulary) {
  // The rows of a token, ascending: first[token], then next[row] until -1.
  std::vector<int32_t> first(vocabulary, -1), next(rows);
  for (int64_t i = rows - 1; i >= 0; i--) {
    const int64_t token = tokens[i] - first_token;
    if (token < 0 || token >= vocabulary) continue;
    next[i] = first[token];
    first[token] = int32_t(i);
  }
  const F16 factor = F16::all(scale);
  each(vocabulary, d, [&](int64_t token) {
    O* to = dw + token * d;
    if (first[token] < 0) {
      std::fill_n(to, d, O{});
      return;
    }
    for (int64_t j = 0; j < d; j += 16) {
      F16 s = F16::zero();
      for (int32_t i = first[token]; i >= 0; i = next[i]) s = fma(load_part(dy + i * d + j, d - j), factor, s);
      store_part(s, to + j, d - j);
    }
  });
}

#define VOCABULARY(T)                                                                                                 \
  template void cross_entropy_backward(const float*, const float*, const int64_t*, const float*, float, float, T*,    \
                                       int64_t, int64_t, int64_t, int64_t);                                           \
  template void embedding_backward(const int64_t*, const T*, float, float*, int64_t, int64_t, int64_t, int64_t);      \
  template void embedding_backward(const int64_t*, const T*, float, bf16*, int64_t, int64_t, int64_t, int64_t);       \
  template void embedding(const int64_t*, const float*, float, T*, int64_t, int64_t, int64_t, int64_t);               \
  template void embedding(const int64_t*, const bf16*, float, T*, int64_t, int64_t, int64_t, int64_t);                \
  template void scaled(const float*, float, T*, int64_t);                                                             \
  template void scaled(const bf16*, float, T*, int64_t)
VOCABULARY(float);
VOCABULARY(bf16);

}  // namespace lockstep
