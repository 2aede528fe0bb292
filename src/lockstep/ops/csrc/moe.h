// Entry points of the mixture-of-experts kernels (moe.cpp, router.cpp). E experts, of which a token chooses K.
#pragma once

#include <cstdint>

#include "bf16.h"

namespace lockstep {

struct Routing {
  int64_t experts, top_k;
  bool sigmoid;               // scores: sigmoid of each logit, else softmax over all
  bool normalize;             // divide a token's weights by their sum
  int64_t groups, top_groups; // experts lie in equal groups, of which only the best are chosen from (1, 1: all)
  bool pairs;                 // a group is as good as its two best experts together, else as its best one
  float scale;                // factor on all weights
};

// logits [tokens, experts]; bias [experts] or null, added to the scores for the choice alone.
// chosen [tokens, top_k], ascending; weights [tokens, top_k].
void route(const float* logits, const float* bias, const Routing& r, int64_t tokens, int32_t* chosen, float* weights);
void route_backward(const float* d_weights, const float* logits, const int32_t* chosen, const Routing& r,
                    int64_t tokens, float* d_logits);

// sums [experts] of softmax(logits) over the tokens, ascending; and the gradient of that.
void softmax_sums(const float* logits, int64_t tokens, int64_t experts, float* sums);
// share_e = n_e E / rows^2 in float32, n_e the rows of expert e in all layers together; offsets: one [E + 1] per layer.
void balance_share(const std::vector<const int32_t*>& offsets, int64_t experts, int64_t rows, float* share);
void softmax_sums_backward(const float* d_sums, const float* logits, int64_t tokens, int64_t experts, float* d_logits);

// Rows of the grouped order: by expert, then by token. offsets [experts + 1]: where an expert's rows begin.
// rows [tokens * top_k]: the token of each row. slots [tokens, top_k]: the row of each choice.
void group(const int32_t* chosen, int64_t tokens, int64_t top_k, int64_t experts, int32_t* offsets, int32_t* rows,
           int32_t* slots);

// y[row] = x[rows[row]]; and its gradient, dx[token] = sum of dy over the token's choices, ascending.
template <typename T>
void dispatch(const T* x, const int32_t* rows, T* y, int64_t count, int64_t d);
template <typename T>
void dispatch_backward(const T* dy, const int32_t* slots, T* dx, int64_t tokens, int64_t top_k, int64_t d);

// out[token] = sum over its choices, ascending, of weight * y[slot].
template <typename T>
void combine(const T* y, const float* weights, const int32_t* slots, T* out, int64_t tokens, int64_t top_k, int64_t d);
template <typename T>
void combine_backward(const T* d_out, const T* y, const float* weights, const int32_t* slots, T* dy, float* d_weights,
                      int64_t tokens, int64_t top_k, int64_t d);

// Products of each expert's rows of a with its own matrix: the chain of `gemm`, so the bits of `linear`.
template <typename T, typename O>
void grouped_gemm(const T* a, const int32_t* offsets, int64_t experts, const T* const* packed, O* y, int64_t n,
                  int64_t k);
// The same from matrices that are not laid out: [n, k], or by_rows [k, n].
template <typename S, typename T, typename O>
void grouped_product(const T* a, const int32_t* offsets, int64_t experts, const S* const* weights, bool by_rows, O* y,
                     int64_t n, int64_t k);
// Gate and up of each expert's rows with their gated activation: `gemm_gated` within a group. gate, up: null, or what
// receives both products. From packed matrices, or from [n, k] ones that are not laid out.
template <typename T>
void grouped_gated(const T* a, const int32_t* offsets, int64_t experts, const T* const* gates, const T* const* ups,
                   int kind, T* y, T* gate, T* up, int64_t n, int64_t k);
template <typename S, typename T>
void grouped_gated_product(const T* a, const int32_t* offsets, int64_t experts, const S* const* gates,
                           const S* const* ups, int kind, T* y, T* gate, T* up, int64_t n, int64_t k);
// dw[expert] [n, k] = transpose(dy rows [*, n]) x rows [*, k]; zero for an expert without rows.
template <typename T>
void grouped_weight_gradient(const T* dy, const T* x, const int32_t* offsets, int64_t experts, float* dw, int64_t n,
                             int64_t k);

}  // namespace lockstep
