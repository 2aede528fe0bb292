// Operators on the vocabulary: log-softmax, entropy, the cross-entropy gradient, the embedding and its gradient.
//
// Reduction order (the contract): the sum of exponentials of a row is 64 chains (chain j adds elements j, j + 64,
// ... in ascending order), combined as (c0 + c1) + (c2 + c3) over their four vectors and then by the tree of `sum`.
// A row of the embedding gradient is one chain over the tokens in ascending order.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "math16.h"

namespace lockstep {

namespace {

float row_log_sum_exp(const float* x, int64_t n) {
  const float low = -INFINITY;
  F16 top = F16::all(low);
  for (int64_t j = 0; j < n; j += 16) top = max(load_part(x + j, n - j, low), top);
  const float peak = largest(top);
  F16 chains[4] = {F16::zero(), F16::zero(), F16::zero(), F16::zero()};
  for (int64_t j = 0; j < n; j += 64)
    for (int64_t c = 0; c < 4 && j + 16 * c < n; c++) {
      const int64_t at = j + 16 * c;
      chains[c] = chains[c] + exp(load_part(x + at, n - at, low) - F16::all(peak));
    }
  return peak + float(std::log(double(sum((chains[0] + chains[1]) + (chains[2] + chains[3])))));
}

}  // namespace

void log_sum_exp(const float* logits, float* lse, int64_t rows, int64_t vocabulary) {
#pragma omp parallel for schedule(static) if (rows * vocabulary > GRAIN)
  for (int64_t i = 0; i < rows; i++) lse[i] = row_log_sum_exp(logits + i * vocabulary, vocabulary);
}

void log_softmax(const float* logits, float* y, int64_t rows, int64_t vocabulary) {
#pragma omp parallel for schedule(static) if (rows * vocabulary > GRAIN)
  for (int64_t i = 0; i < rows; i++) {
    const float* x = logits + i * vocabulary;
    const F16 lse = F16::all(row_log_sum_exp(x, vocabulary));
    for (int64_t j = 0; j < vocabulary; j += 16)
      store_part(load_part(x + j, vocabulary - j) - lse, y + i * vocabulary + j, vocabulary - j);
  }
}

// Both sums go as that of `row_log_sum_exp` does; a logit of -inf adds an exact zero.
void entropies(const float* logits, const float* lse, float* y, int64_t rows, int64_t vocabulary) {
  const float low = -INFINITY;
#pragma omp parallel for schedule(static) if (rows * vocabulary > GRAIN)
  for (int64_t i = 0; i < rows; i++) {
    const float* x = logits + i * vocabulary;
    const F16 log_z = F16::all(lse[i]);
    F16 chains[4] = {F16::zero(), F16::zero(), F16::zero(), F16::zero()};
    for (int64_t j = 0; j < vocabulary; j += 64)
      for (int64_t c = 0; c < 4 && j + 16 * c < vocabulary; c++) {
        const int64_t at = j + 16 * c;
        const F16 log_p = load_part(x + at, vocabulary - at, low) - log_z;
        chains[c] = chains[c] - exp(log_p) * max(F16::all(-1000.0f), log_p);
      }
    y[i] = sum((chains[0] + chains[1]) + (chains[2] + chains[3]));
  }
}

void softcap(const float* logits, float cap, float* y, int64_t count) {
#pragma omp parallel for schedule(static) if (count > GRAIN)
  for (int64_t j = 0; j < count; j += 16)
    store_part(capped(load_part(logits + j, count - j), cap), y + j, count - j);
}

template <typename T>
void cross_entropy_backward(const float* logits, const float* lse, const int64_t* targets, const float* weights,
                            float z_loss, float softcap, T* d_logits, int64_t rows, int64_t vocabulary) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    const float* x = logits + i * vocabulary;
    T* d = d_logits + i * vocabulary;
    if (targets[i] < 0) {
      for (int64_t j = 0; j < vocabulary; j += 16) store_part(F16::zero(), d + j, vocabulary - j);
      continue;
    }
    const F16 log_z = F16::all(lse[i]);
    const float factor = weights[i] * (1.0f + 2.0f * z_loss * lse[i]);
    for (int64_t j = 0; j < vocabulary; j += 16) {
      const F16 logit = load_part(x + j, vocabulary - j);
      F16 g = exp(logit - log_z) * F16::all(factor);
      if (softcap > 0.0f) g = g * capped_slope(logit, softcap);
      store_part(g, d + j, vocabulary - j);
    }
    const int64_t t = targets[i];
    const float p = factor * std::exp(x[t] - lse[i]), share = softcap > 0.0f ? x[t] / softcap : 0.0f;
    from_float((p - weights[i]) * (1.0f - share * share), d + t);
  }
}

template <typename T, typename O>
void scaled(const T* x, float scale, O* y, int64_t count) {
  if (static_cast<const void*>(x) == static_cast<const void*>(y) && scale == 1.0f) return;
  const F16 factor = F16::all(scale);
#pragma omp parallel for schedule(static) if (count > GRAIN)
  for (int64_t j = 0; j < count; j += 16) store_part(load_part(x + j, count - j) * factor, y + j, count - j);
}

template <typename S, typename T>
void embedding(const int64_t* tokens, const S* weight, float scale, T* y, int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static) if (rows * d > GRAIN)
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < d; j += 16) {
      store_part(load_part(weight + tokens[i] * d + j, d - j), y + i * d + j, d - j);
      if (scale != 1.0f) store_part(load_part(y + i * d + j, d - j) * F16::all(scale), y + i * d + j, d - j);
    }
}

template <typename T>
void embedding_backward(const int64_t* tokens, const T* dy, float scale, float* dw, int64_t rows, int64_t d,
                        int64_t vocabulary) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < vocabulary; i++) std::fill_n(dw + i * d, d, 0.0f);
#pragma omp parallel for schedule(static)
  for (int64_t j = 0; j < d; j += 64)  // a thread owns columns, so the order of a row's chain is the tokens' order
    for (int64_t i = 0; i < rows; i++)
      for (int64_t c = j; c < std::min(j + 64, d); c += 16) {
        float* w = dw + tokens[i] * d + c;
        store_part(fma(load_part(dy + i * d + c, d - c), F16::all(scale), load_part(w, d - c)), w, d - c);
      }
}

#define VOCABULARY(T)                                                                                                 \
  template void cross_entropy_backward(const float*, const float*, const int64_t*, const float*, float, float, T*,    \
                                       int64_t, int64_t);                                                             \
  template void embedding_backward(const int64_t*, const T*, float, float*, int64_t, int64_t, int64_t);               \
  template void embedding(const int64_t*, const float*, float, T*, int64_t, int64_t);                                 \
  template void embedding(const int64_t*, const bf16*, float, T*, int64_t, int64_t);                                  \
  template void scaled(const float*, float, T*, int64_t);                                                             \
  template void scaled(const bf16*, float, T*, int64_t)
VOCABULARY(float);
VOCABULARY(bf16);

}  // namespace lockstep
