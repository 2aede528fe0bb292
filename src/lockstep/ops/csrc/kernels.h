// The kernels' entry points. Plain C++ over pointers: no PyTorch header, so that a build takes seconds.
// T is float or bf16. Sizes are in elements. Threads share a kernel's tasks (team.h): no result depends on them.
#pragma once

#include <cstdint>

#include "bf16.h"

namespace lockstep {

// Elements below which a kernel runs on the calling thread: waking the others would take longer than the work.
constexpr int64_t GRAIN = 1 << 15;

// --- products (gemm.cpp) ---
constexpr int64_t PANEL = 16;
inline int64_t panels(int64_t n) { return (n + PANEL - 1) / PANEL; }

// Lay a matrix out for a product: out[panel][k][16], zero where the last panel has no column; bfloat16 by pairs,
// out[panel][k / 2][16][2], where it is multiplied so (steps.h).
// pack_columns: source [n, k] (a weight), contraction along its columns. pack_rows: source [k, n].
template <typename S, typename T>
void pack_columns(const S* source, int64_t n, int64_t k, T* out);
template <typename S, typename T>
void pack_rows(const S* source, int64_t k, int64_t n, T* out);

// y[m, n] = a x b (+ bias); a(i, p) = a[i * row_stride + p * k_stride]; b packed.
// accumulate (O float only): the sum starts from what y holds instead of 0.
template <typename T, typename O>
void gemm(const T* a, int64_t row_stride, int64_t k_stride, const T* b, const T* bias, O* y, int64_t m, int64_t n,
          int64_t k, bool accumulate);
template <typename T>
void column_sums(const T* x, int64_t rows, int64_t columns, float* y);

// --- attention (attention.cpp, attention_backward.cpp) ---
constexpr int64_t BLOCK = 64;  // keys in a block; blocks are aligned to position 0
constexpr float LOG2E = 1.44269504088896f;  // scores are to base 2: forward and backward must scale alike

struct AttentionShape {
  int64_t tokens, sequences, heads, kv_heads;
  int64_t dim, v_dim;        // of a query or key head; of a value head
  const int32_t* starts;     // [sequences + 1]
  const int32_t* positions;  // [tokens]
  float scale;
  int64_t window;        // 0: none
  float softcap = 0.0f;  // 0: none, else scores become softcap * tanh(score / softcap)
};
// Keys of block j of sequence s: page table[s * width + j]; k pages [kv_heads, dim, BLOCK], v pages [kv_heads, BLOCK, v_dim].
template <typename T>
void write_kv(const T* k, const T* v, T* k_pages, T* v_pages, const int32_t* table, int64_t width,
              const AttentionShape& shape);
template <typename T>
void attention_paged(const T* q, const T* k_pages, const T* v_pages, const int32_t* table, int64_t width, T* out,
                     const AttentionShape& shape);
// Whole sequences: k [tokens, kv_heads, dim], v [tokens, kv_heads, v_dim]. lse: log2 of the sum of 2^score, [tokens, heads].
template <typename T>
void attention_packed(const T* q, const T* k, const T* v, T* out, float* lse, const AttentionShape& shape);
template <typename T>
void attention_backward(const T* q, const T* k, const T* v, const T* out, const float* lse, const T* d_out, T* dq,
                        T* dk, T* dv, const AttentionShape& shape);

// --- norms (norm.cpp) ---
// The residual sum before a norm, X float: with h, `sum` receives x + h and is what is normed.
template <typename T>
struct Residual {
  const T* h = nullptr;
  float* sum = nullptr;
};
// Its backward: with d_sum, the gradient that the sum has from elsewhere, dx receives both, and dh dx rounded to T.
template <typename T>
struct ResidualGradient {
  const float* d_sum = nullptr;
  T* dh = nullptr;
};
// x may be wider than y: a float32 residual stream feeds bfloat16 layers.
template <typename X, typename T>
void rms_norm(const X* x, const T* weight, float eps, float offset, T* y, float* rstd, int64_t rows, int64_t d,
              Residual<T> residual);
template <typename X, typename T>
void rms_norm_backward(const T* dy, const X* x, const T* weight, float offset, const float* rstd, X* dx, float* dw,
                       int64_t rows, int64_t d, ResidualGradient<T> residual);
template <typename X, typename T>
void rms_norm_weight_gradient(const T* dy, const X* x, const float* rstd, const float* before, float* dw, int64_t rows,
                              int64_t d);
template <typename X, typename T>
void layer_norm(const X* x, const T* weight, const T* bias, float eps, T* y, float* mean, float* rstd, int64_t rows,
                int64_t d, Residual<T> residual);
template <typename X, typename T>
void layer_norm_backward(const T* dy, const X* x, const T* weight, const float* mean, const float* rstd, X* dx,
                         float* dw, float* db, int64_t rows, int64_t d, ResidualGradient<T> residual);

// --- rows (rows.cpp) ---
// table [*, dim / 2, 2] of cos, sin; sign -1 rotates back (the gradient).
template <typename T>
void rope(const T* x, const int32_t* positions, const float* table, float sign, T* y, int64_t tokens, int64_t heads,
          int64_t dim);
enum Activation { SILU = 0, GELU_TANH = 1 };
template <typename T>
void activation(const T* x, int kind, T* y, int64_t count);
template <typename T>
void activation_backward(const T* dy, const T* x, int kind, T* dx, int64_t count);
template <typename T>
void gated(const T* gate, const T* up, int activation, T* y, int64_t count);
template <typename T>
void gated_backward(const T* dy, const T* gate, const T* up, int activation, T* d_gate, T* d_up, int64_t count);

// x [tokens, d] -> y [tokens, heads, d], a copy for every head; and its gradient, the sum over the heads.
template <typename T>
void share_heads(const T* x, T* y, int64_t tokens, int64_t heads, int64_t d);
template <typename T>
void share_heads_backward(const T* dy, T* dx, int64_t tokens, int64_t heads, int64_t d);

// --- chains in one pass (fused.cpp); all a [m, k], weights packed, n columns ---
// y = activation(a x gate) * (a x up), both products rounded first, and kept in gate and up unless null.
template <typename T>
void gemm_gated(const T* a, const T* gate_weight, const T* up_weight, int kind, T* y, T* gate, T* up, int64_t m,
                int64_t n, int64_t k);
// y = activation(a x weight + bias), the argument rounded first, and kept in `before` unless null.
template <typename T>
void gemm_activation(const T* a, const T* weight, const T* bias, int kind, T* y, T* before, int64_t m, int64_t n,
                     int64_t k);
// Three products of one a, as one: y = a x weight (+ bias), each [m, its n].
template <typename T>
struct Product {
  const T *weight, *bias;
  T* y;
  int64_t n;
};
template <typename T>
void gemm_three(const T* a, const Product<T> (&parts)[3], int64_t m, int64_t k);
// y = x + a x weight, the product rounded to T first: a branch that joins the residual stream. y may be x.
template <typename T>
void gemm_add(const float* x, const T* a, const T* weight, float* y, int64_t m, int64_t n, int64_t k);
// RMS norm of every head, rounded, then the rotation.
template <typename T>
void norm_rope(const T* x, const T* weight, float eps, float offset, const int32_t* positions, const float* table,
               T* y, float* rstd, int64_t tokens, int64_t heads, int64_t dim);
// The rotation of k (rotary: the table of cos and sin), rounded, then write_kv.
template <typename T>
void rope_write_kv(const T* k, const T* v, const float* rotary, T* k_pages, T* v_pages, const int32_t* table,
                   int64_t width, const AttentionShape& a);

// --- optimizer (optimizer.cpp) ---
constexpr int64_t SQUARE_BLOCK = 1 << 16;
struct AdamWFactors {
  float scale, beta1, rest1, beta2, rest2, root, eps, keep, lr;
};
void adamw(float* p, const float* g, float* m, float* v, int64_t count, const AdamWFactors& f);
double square_sum(const float* x, int64_t count);

// --- weights (dequantize.cpp) ---
// count values of a ggml format (by its number) from whole blocks; false for an unknown format.
template <typename T>
bool dequantize(int kind, const uint8_t* blocks, int64_t count, T* out);

// --- vocabulary (vocabulary.cpp) ---
// Rows of the weight, which has those of tokens first .. first + held - 1, rounded to T; times scale (a value of T)
// unless that is 1. Of other tokens rows of -0: added to what has the row they change no bit of it.
template <typename S, typename T>
void embedding(const int64_t* tokens, const S* weight, float scale, T* y, int64_t rows, int64_t d, int64_t first,
               int64_t held);
template <typename T, typename O>
void embedding_backward(const int64_t* tokens, const T* dy, float scale, O* dw, int64_t rows, int64_t d,
                        int64_t first_token, int64_t vocabulary);
// Of each of the row's segments, which are equal but for one element: lse [rows, segments], and so are entropies.
void log_sum_exp(const float* logits, float* lse, int64_t rows, int64_t vocabulary, int64_t segments);
void log_softmax(const float* logits, float* y, int64_t rows, int64_t vocabulary);
// - sum of p log p: the entropy of a row's distribution in nats, by segments.
void entropies(const float* logits, const float* lse, float* y, int64_t rows, int64_t vocabulary, int64_t segments);
// y = cap * tanh(logits / cap); y may be logits.
void softcap(const float* logits, float cap, float* y, int64_t count);
// d_logits = weight * ((1 + 2 z lse) softmax - onehot(target)), through the soft cap if there is one; zero rows where
// target < 0. The logits are of tokens first .. first + vocabulary - 1. Rows of d_logits are `stride` apart; one may begin
// where the row of the logits does, no longer than that.
template <typename T>
void cross_entropy_backward(const float* logits, const float* lse, const int64_t* targets, const float* weights,
                            float z_loss, float softcap, T* d_logits, int64_t stride, int64_t rows, int64_t vocabulary,
                            int64_t first);
// y = x * scale, one product, rounded to O. In place with scale 1 nothing is done: x * 1 is x.
template <typename T, typename O>
void scaled(const T* x, float scale, O* y, int64_t count);

// --- the head and its loss in one (cross_entropy.cpp) ---
// Logits at a time, in a multiple of 32 rows: rows are independent, and chains over them go by pairs (pairs16.h) or by
// tiles of 32 (tiles.h), so this changes no bit.
constexpr int64_t LOGITS_HELD = 1 << 23;
// Null where not asked for: entropies, d_hidden, d_weight.
template <typename T>
struct LinearCrossEntropy {
  int64_t rows, width, vocabulary, step;  // step: rows whose logits are held at a time
  const T* hidden;                        // [rows, width]
  const int64_t* targets;                 // [rows], negative: ignored
  const float* token_weights;             // [rows]
  float z_loss, softcap;
  float *loss, *logprobs, *entropies;  // [1], [rows], [rows]
  T* d_hidden;                         // [rows, width]
  float* d_weight;                     // [vocabulary, width]
  // What it works in: the packed weight, [step, vocabulary], [step], [rows], the weight and hidden packed by rows.
  T* columns;
  float *logits, *lse, *losses;
  T *rows_of_weight, *rows_of_hidden;
};
template <typename T, typename S>
void linear_cross_entropy(const LinearCrossEntropy<T>& c, const S* weight);

}  // namespace lockstep
