// The output head and its loss in one pass that never holds the logits of a whole batch.
//
// Order (the contract): a row's logits are the product of `gemm.cpp`, then capped if there is a soft cap; its
// log-sum-exp, entropy and gradient are those of `vocabulary.cpp`; logprob = logit - log_z, one rounding. The loss is
// one chain over the rows in ascending order, d_weight one chain per element over the rows in ascending order (a
// chunk goes on where the one before it ended), d_hidden a product of the rounded gradient of the logits.
#include <algorithm>

#include "kernels.h"

namespace lockstep {

namespace {

// Logits of rows first .. first + count - 1, and all that is a function of one row of them.
template <typename T>
void forward_rows(const LinearCrossEntropy<T>& c, int64_t first, int64_t count) {
  gemm<T, float>(c.hidden + first * c.width, c.width, 1, c.columns, nullptr, c.logits, count, c.vocabulary, c.width,
                 false);
  if (c.softcap > 0.0f) softcap(c.logits, c.softcap, c.logits, count * c.vocabulary);
  log_sum_exp(c.logits, c.lse, count, c.vocabulary, 1);
  if (c.entropies) entropies(c.logits, c.lse, c.entropies + first, count, c.vocabulary, 1);
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = first + i, target = c.targets[row];
    const float log_z = c.lse[i], logprob = c.logits[i * c.vocabulary + std::max<int64_t>(target, 0)] - log_z;
    c.logprobs[row] = logprob;
    c.losses[row] = target < 0 ? 0.0f : (log_z * log_z * c.z_loss - logprob) * c.token_weights[row];
  }
}

template <typename T>
void backward_rows(const LinearCrossEntropy<T>& c, int64_t first, int64_t count) {
  // Where the logits were, which nothing needs any more.
  T* const d_logits = reinterpret_cast<T*>(c.logits);
  const int64_t stride = c.vocabulary * int64_t(sizeof(float) / sizeof(T));
  cross_entropy_backward(c.logits, c.lse, c.targets + first, c.token_weights + first, c.z_loss, c.softcap, d_logits,
                         stride, count, c.vocabulary, 0);
  if (c.d_hidden)
    gemm<T, T>(d_logits, stride, 1, c.rows_of_weight, nullptr, c.d_hidden + first * c.width, count, c.width,
               c.vocabulary, false);
  if (c.d_weight) {
    pack_rows(c.hidden + first * c.width, count, c.width, c.rows_of_hidden);
    gemm<T, float>(d_logits, 1, stride, c.rows_of_hidden, nullptr, c.d_weight, c.vocabulary, c.width, count,
                   first > 0);
  }
}

}  // namespace

template <typename T, typename S>
void linear_cross_entropy(const LinearCrossEntropy<T>& c, const S* weight) {
  pack_columns(weight, c.vocabulary, c.width, c.columns);
  if (c.d_hidden) pack_rows(weight, c.vocabulary, c.width, c.rows_of_weight);
  if (c.d_weight && c.rows == 0) std::fill_n(c.d_weight, c.vocabulary * c.width, 0.0f);
  for (int64_t first = 0; first < c.rows; first += c.step) {
    const int64_t count = std::min(c.step, c.rows - first);
    forward_rows(c, first, count);
    if (c.d_hidden || c.d_weight) backward_rows(c, first, count);
  }
  column_sums(c.losses, c.rows, 1, c.loss);
}

template void linear_cross_entropy(const LinearCrossEntropy<float>&, const float*);
template void linear_cross_entropy(const LinearCrossEntropy<float>&, const bf16*);
template void linear_cross_entropy(const LinearCrossEntropy<bf16>&, const float*);
template void linear_cross_entropy(const LinearCrossEntropy<bf16>&, const bf16*);

}  // namespace lockstep
