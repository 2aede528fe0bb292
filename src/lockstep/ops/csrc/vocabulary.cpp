// Operators on the vocabulary: log-softmax, the cross-entropy gradient, the embedding gradient.
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

template <typename T>
void cross_entropy_backward(const float* logits, const float* lse, const int64_t* targets, const float* weights,
                            float z_loss, T* d_logits, int64_t rows, int64_t vocabulary) {
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
    for (int64_t j = 0; j < vocabulary; j += 16)
      store_part(exp(load_part(x + j, vocabulary - j) - log_z) * F16::all(factor), d + j, vocabulary - j);
    const int64_t t = targets[i];
    const float p = factor * std::exp(x[t] - lse[i]);
    from_float(p - weights[i], d + t);
  }
}

template <typename T>
void embedding_backward(const int64_t* tokens, const T* dy, float scale, float* dw, int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static)
  for (int64_t j = 0; j < d; j += 64)  // a thread owns columns, so the order of a row's chain is the tokens' order
    for (int64_t i = 0; i < rows; i++)
      for (int64_t c = j; c < std::min(j + 64, d); c += 16) {
        float* w = dw + tokens[i] * d + c;
        store_part(fma(load_part(dy + i * d + c, d - c), F16::all(scale), load_part(w, d - c)), w, d - c);
      }
}

template void cross_entropy_backward(const float*, const float*, const int64_t*, const float*, float, float*, int64_t,
                                     int64_t);
template void cross_entropy_backward(const float*, const float*, const int64_t*, const float*, float, bf16*, int64_t,
                                     int64_t);
template void embedding_backward(const int64_t*, const float*, float, float*, int64_t, int64_t);
template void embedding_backward(const int64_t*, const bf16*, float, float*, int64_t, int64_t);

}  // namespace lockstep
