// The kernels as PyTorch operators `lockstep::*`. Checks shapes and types, allocates outputs, passes pointers.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "kernels.h"

namespace lockstep {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename T>
struct Element;
template <>
struct Element<float> {
  static constexpr auto type = at::kFloat;
};
template <>
struct Element<bf16> {
  static constexpr auto type = at::kBFloat16;
};

template <typename T>
T* data(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == Element<T>::type, "expected ", Element<T>::type, ", got ", x.scalar_type());
  TORCH_CHECK(x.is_contiguous(), "expected a contiguous tensor");
  return static_cast<T*>(x.data_ptr());
}
const int32_t* ints(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kInt && x.is_contiguous(), "expected a contiguous int32 tensor");
  return x.data_ptr<int32_t>();
}
const int64_t* longs(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kLong && x.is_contiguous(), "expected a contiguous int64 tensor");
  return x.data_ptr<int64_t>();
}

// Calls f(T*) with a null pointer of the element type: float or bf16.
template <typename F>
auto by_type(at::ScalarType type, F f) {
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "expected float32 or bfloat16, got ", type);
  return type == at::kFloat ? f((float*)nullptr) : f((bf16*)nullptr);
}
#define TYPE_OF(pointer) std::remove_pointer_t<decltype(pointer)>

Tensor pack(const Tensor& source, at::ScalarType type, bool columns) {
  const int64_t rows = source.size(0), width = source.size(1);
  const int64_t n = columns ? rows : width, k = columns ? width : rows;
  Tensor out = at::empty({panels(n), k, PANEL}, source.options().dtype(type));
  by_type(source.scalar_type(), [&](auto* s) {
    by_type(type, [&](auto* t) {
      using S = TYPE_OF(s);
      using T = TYPE_OF(t);
      columns ? pack_columns(data<S>(source), n, k, data<T>(out)) : pack_rows(data<S>(source), k, n, data<T>(out));
    });
  });
  return out;
}
Tensor pack_columns_op(const Tensor& source, at::ScalarType type) { return pack(source, type, true); }
Tensor pack_rows_op(const Tensor& source, at::ScalarType type) { return pack(source, type, false); }

Tensor gemm_op(const Tensor& a, const Tensor& packed, int64_t n, const OptionalTensor& bias, at::ScalarType out_type) {
  const int64_t m = a.size(0), k = a.size(1);
  TORCH_CHECK(packed.size(0) == panels(n) && packed.size(1) == k, "product of [", m, ", ", k, "] with packed ",
              packed.sizes(), " for ", n, " columns");
  Tensor y = at::empty({m, n}, a.options().dtype(out_type));
  by_type(a.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    const T* b = bias ? data<T>(*bias) : nullptr;
    if (out_type == at::kFloat)
      gemm<T, float>(data<T>(a), k, 1, data<T>(packed), b, data<float>(y), m, n, k, false);
    else
      gemm<T, T>(data<T>(a), k, 1, data<T>(packed), b, data<T>(y), m, n, k, false);
  });
  return y;
}

// out[m, n] (float32) = or += transpose(a [k, m]) x packed.
void gemm_transposed_op(const Tensor& a, const Tensor& packed, const Tensor& out, bool accumulate) {
  const int64_t k = a.size(0), m = a.size(1), n = out.size(1);
  TORCH_CHECK(out.size(0) == m && packed.size(0) == panels(n) && packed.size(1) == k, "transposed product of [", k,
              ", ", m, "] with packed ", packed.sizes(), " into ", out.sizes());
  by_type(a.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    gemm<T, float>(data<T>(a), 1, m, data<T>(packed), nullptr, data<float>(out), m, n, k, accumulate);
  });
}

Tensor column_sums_op(const Tensor& x) {
  Tensor y = at::empty({x.size(1)}, x.options().dtype(at::kFloat));
  by_type(x.scalar_type(),
          [&](auto* t) { column_sums(data<TYPE_OF(t)>(x), x.size(0), x.size(1), data<float>(y)); });
  return y;
}

AttentionShape shape(const Tensor& q, int64_t kv_heads, int64_t v_dim, const Tensor& starts, const Tensor& positions,
                     double scale, int64_t window) {
  TORCH_CHECK(q.dim() == 3 && q.size(2) % 16 == 0 && v_dim % 16 == 0, "widths of heads must be multiples of 16, got ",
              q.size(2), " and ", v_dim);
  TORCH_CHECK(q.size(1) % kv_heads == 0, q.size(1), " heads do not divide into ", kv_heads, " kv heads");
  return {q.size(0), starts.size(0) - 1, q.size(1), kv_heads, q.size(2), v_dim, ints(starts), ints(positions),
          float(scale), window};
}

void write_kv_op(const Tensor& k, const Tensor& v, const Tensor& k_pages, const Tensor& v_pages, const Tensor& table,
                 const Tensor& starts, const Tensor& positions) {
  const AttentionShape a = shape(k, k.size(1), v.size(2), starts, positions, 1.0, 0);
  by_type(k.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    write_kv(data<T>(k), data<T>(v), data<T>(k_pages), data<T>(v_pages), ints(table), table.size(1), a);
  });
}

Tensor attention_paged_op(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages, const Tensor& table,
                          const Tensor& starts, const Tensor& positions, double scale, int64_t window) {
  Tensor out = at::empty({q.size(0), q.size(1), v_pages.size(3)}, q.options());
  const AttentionShape a = shape(q, k_pages.size(1), v_pages.size(3), starts, positions, scale, window);
  by_type(q.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    attention_paged(data<T>(q), data<T>(k_pages), data<T>(v_pages), ints(table), table.size(1), data<T>(out), a);
  });
  return out;
}

std::tuple<Tensor, Tensor> attention_packed_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& starts,
                                               const Tensor& positions, double scale, int64_t window) {
  Tensor out = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
  Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  const AttentionShape a = shape(q, k.size(1), v.size(2), starts, positions, scale, window);
  by_type(q.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    attention_packed(data<T>(q), data<T>(k), data<T>(v), data<T>(out), data<float>(lse), a);
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_op(const Tensor& d_out, const Tensor& q, const Tensor& k,
                                                         const Tensor& v, const Tensor& out, const Tensor& lse,
                                                         const Tensor& starts, const Tensor& positions, double scale,
                                                         int64_t window) {
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  const AttentionShape a = shape(q, k.size(1), v.size(2), starts, positions, scale, window);
  by_type(q.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    attention_backward(data<T>(q), data<T>(k), data<T>(v), data<T>(out), data<float>(lse), data<T>(d_out), data<T>(dq),
                       data<T>(dk), data<T>(dv), a);
  });
  return {dq, dk, dv};
}

// Calls f(X*, T*) for the types of a norm: x, and y as the weight is; x is never narrower than y.
template <typename F>
void norm_types(const Tensor& x, const Tensor& weight, F f) {
  by_type(weight.scalar_type(), [&](auto* t) {
    if (x.scalar_type() == at::kFloat)
      f((float*)nullptr, t);
    else
      f(t, t);
  });
}

std::tuple<Tensor, Tensor> rms_norm_op(const Tensor& x, const Tensor& weight, double eps, double offset) {
  const int64_t d = x.size(-1), rows = x.numel() / d;
  Tensor y = at::empty(x.sizes(), weight.options()), rstd = at::empty({rows}, x.options().dtype(at::kFloat));
  norm_types(x, weight, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    rms_norm(data<X>(x), data<T>(weight), float(eps), float(offset), data<T>(y), data<float>(rstd), rows, d);
  });
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward_op(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                const Tensor& rstd, double offset) {
  const int64_t d = x.size(-1), rows = x.numel() / d;
  Tensor dx = at::empty_like(x), dw = at::empty({d}, x.options().dtype(at::kFloat));
  norm_types(x, weight, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    rms_norm_backward(data<T>(dy), data<X>(x), data<T>(weight), float(offset), data<float>(rstd), data<X>(dx),
                      data<float>(dw), rows, d);
  });
  return {dx, dw};
}

Tensor rope_op(const Tensor& x, const Tensor& positions, const Tensor& table, double sign) {
  TORCH_CHECK(table.size(1) * 2 == x.size(2), "rotary table ", table.sizes(), " for heads of ", x.size(2));
  Tensor y = at::empty_like(x);
  by_type(x.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    rope(data<T>(x), ints(positions), data<float>(table), float(sign), data<T>(y), x.size(0), x.size(1), x.size(2));
  });
  return y;
}

Tensor gated_op(const Tensor& gate, const Tensor& up, int64_t activation) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "gate ", gate.sizes(), " and up ", up.sizes());
  Tensor y = at::empty_like(gate);
  by_type(gate.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    gated(data<T>(gate), data<T>(up), int(activation), data<T>(y), gate.numel());
  });
  return y;
}

std::tuple<Tensor, Tensor> gated_backward_op(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                             int64_t activation) {
  Tensor d_gate = at::empty_like(gate), d_up = at::empty_like(up);
  by_type(gate.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    gated_backward(data<T>(dy), data<T>(gate), data<T>(up), int(activation), data<T>(d_gate), data<T>(d_up),
                   gate.numel());
  });
  return {d_gate, d_up};
}

Tensor embedding_backward_op(const Tensor& dy, const Tensor& tokens, int64_t vocabulary, double scale) {
  Tensor dw = at::zeros({vocabulary, dy.size(1)}, dy.options().dtype(at::kFloat));
  by_type(dy.scalar_type(), [&](auto* t) {
    embedding_backward(longs(tokens), data<TYPE_OF(t)>(dy), float(scale), data<float>(dw), dy.size(0), dy.size(1));
  });
  return dw;
}

Tensor log_sum_exp_op(const Tensor& logits) {
  Tensor lse = at::empty({logits.size(0)}, logits.options());
  log_sum_exp(data<float>(logits), data<float>(lse), logits.size(0), logits.size(1));
  return lse;
}

Tensor log_softmax_op(const Tensor& logits) {
  Tensor y = at::empty_like(logits);
  log_softmax(data<float>(logits), data<float>(y), logits.size(0), logits.size(1));
  return y;
}

Tensor cross_entropy_backward_op(const Tensor& logits, const Tensor& lse, const Tensor& targets, const Tensor& weights,
                                 double z_loss, at::ScalarType type) {
  Tensor d = at::empty_like(logits, logits.options().dtype(type));
  by_type(type, [&](auto* t) {
    cross_entropy_backward(data<float>(logits), data<float>(lse), longs(targets), data<float>(weights), float(z_loss),
                           data<TYPE_OF(t)>(d), logits.size(0), logits.size(1));
  });
  return d;
}

void adamw_op(const Tensor& p, const Tensor& g, const Tensor& m, const Tensor& v, double scale, double beta1,
              double rest1, double beta2, double rest2, double root, double eps, double keep, double lr) {
  TORCH_CHECK(p.numel() == g.numel() && p.numel() == m.numel() && p.numel() == v.numel(), "sizes differ");
  const AdamWFactors f{float(scale), float(beta1), float(rest1), float(beta2), float(rest2),
                       float(root),  float(eps),   float(keep),  float(lr)};
  adamw(data<float>(p), data<float>(g), data<float>(m), data<float>(v), p.numel(), f);
}

Tensor square_sums_op(const Tensor& x) {
  Tensor sums = at::empty({(x.numel() + SQUARE_BLOCK - 1) / SQUARE_BLOCK}, x.options().dtype(at::kDouble));
  square_sums(data<float>(x), x.numel(), sums.data_ptr<double>());
  return sums;
}

void dequantize_op(const Tensor& blocks, int64_t kind, int64_t size, int64_t count, const Tensor& out) {
  TORCH_CHECK(blocks.scalar_type() == at::kByte && blocks.is_contiguous(), "expected contiguous bytes");
  TORCH_CHECK(out.numel() % count == 0 && blocks.numel() == out.numel() / count * size, blocks.numel(),
              " bytes are not the blocks of ", out.numel(), " values");
  by_type(out.scalar_type(), [&](auto* t) {
    const bool known = dequantize(int(kind), blocks.data_ptr<uint8_t>(), out.numel(), data<TYPE_OF(t)>(out));
    TORCH_CHECK(known, "unknown ggml format ", kind);
  });
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY(lockstep, m) {
  m.def("pack_columns(Tensor source, ScalarType dtype) -> Tensor");
  m.def("pack_rows(Tensor source, ScalarType dtype) -> Tensor");
  m.def("gemm(Tensor a, Tensor packed, int n, Tensor? bias, ScalarType dtype) -> Tensor");
  m.def("gemm_transposed(Tensor a, Tensor packed, Tensor(a!) out, bool accumulate) -> ()");
  m.def("column_sums(Tensor x) -> Tensor");
  m.def("write_kv(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor table, Tensor starts, "
        "Tensor positions) -> ()");
  m.def("attention_paged(Tensor q, Tensor k_pages, Tensor v_pages, Tensor table, Tensor starts, Tensor positions, "
        "float scale, int window) -> Tensor");
  m.def("attention_packed(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor positions, float scale, int window) "
        "-> (Tensor, Tensor)");
  m.def("attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor starts, "
        "Tensor positions, float scale, int window) -> (Tensor, Tensor, Tensor)");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, float offset) -> (Tensor, Tensor)");
  m.def("rope(Tensor x, Tensor positions, Tensor table, float sign) -> Tensor");
  m.def("gated(Tensor gate, Tensor up, int activation) -> Tensor");
  m.def("gated_backward(Tensor dy, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)");
  m.def("embedding_backward(Tensor dy, Tensor tokens, int vocabulary, float scale) -> Tensor");
  m.def("adamw(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, float scale, float beta1, float rest1, float beta2, "
        "float rest2, float root, float eps, float keep, float lr) -> ()");
  m.def("square_sums(Tensor x) -> Tensor");
  m.def("dequantize(Tensor blocks, int kind, int size, int count, Tensor(a!) out) -> ()");
  m.def("log_sum_exp(Tensor logits) -> Tensor");
  m.def("log_softmax(Tensor logits) -> Tensor");
  m.def("cross_entropy_backward(Tensor logits, Tensor lse, Tensor targets, Tensor weights, float z_loss, "
        "ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  using namespace lockstep;
  m.impl("pack_columns", pack_columns_op);
  m.impl("pack_rows", pack_rows_op);
  m.impl("gemm", gemm_op);
  m.impl("gemm_transposed", gemm_transposed_op);
  m.impl("column_sums", column_sums_op);
  m.impl("write_kv", write_kv_op);
  m.impl("attention_paged", attention_paged_op);
  m.impl("attention_packed", attention_packed_op);
  m.impl("attention_backward", attention_backward_op);
  m.impl("rms_norm", rms_norm_op);
  m.impl("rms_norm_backward", rms_norm_backward_op);
  m.impl("rope", rope_op);
  m.impl("gated", gated_op);
  m.impl("gated_backward", gated_backward_op);
  m.impl("embedding_backward", embedding_backward_op);
  m.impl("adamw", adamw_op);
  m.impl("square_sums", square_sums_op);
  m.impl("dequantize", dequantize_op);
  m.impl("log_sum_exp", log_sum_exp_op);
  m.impl("log_softmax", log_softmax_op);
  m.impl("cross_entropy_backward", cross_entropy_backward_op);
}
