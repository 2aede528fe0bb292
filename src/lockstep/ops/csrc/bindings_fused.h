// Chains in one pass as operators.
#pragma once

#include "bindings_attention.h"
#include "bindings_linear.h"
#include "bindings_rows.h"
#include "call.h"

namespace lockstep {

inline void gemm_gated_op(Call& call) {
  const Tensor &a = call.tensor(0), &gate_weight = call.tensor(1), &up_weight = call.tensor(2);
  const int64_t n = call.integer(3), m = a.size(0);
  const bool keep = call.flag(5);
  check_packed(a, gate_weight, n);
  check_packed(a, up_weight, n);
  const int64_t kept = keep ? m : 0;
  Tensor y = call.result({m, n}, a.scalar_type());
  Tensor gate = call.result({kept, n}, a.scalar_type()), up = call.result({kept, n}, a.scalar_type());
  by_type(a, [&](auto* t) {
    using T = TYPE_OF(t);
    gemm_gated<T>(data<T>(a), data<T>(gate_weight), data<T>(up_weight), int(call.integer(4)), data<T>(y),
                  keep ? data<T>(gate) : nullptr, keep ? data<T>(up) : nullptr, m, n, a.size(1));
  });
}

inline void gemm_activation_op(Call& call) {
  const Tensor &a = call.tensor(0), &packed = call.tensor(1);
  const int64_t n = call.integer(2), m = a.size(0);
  const bool keep = call.flag(5);
  check_packed(a, packed, n);
  if (call.given(3)) expect_sizes("bias", call.tensor(3), {n});
  Tensor y = call.result({m, n}, a.scalar_type()), before = call.result({keep ? m : 0, n}, a.scalar_type());
  by_type(a, [&](auto* t) {
    using T = TYPE_OF(t);
    gemm_activation<T>(data<T>(a), data<T>(packed), call.given(3) ? data<T>(call.tensor(3)) : nullptr,
                       int(call.integer(4)), data<T>(y), keep ? data<T>(before) : nullptr, m, n, a.size(1));
  });
}

inline void gemm_three_op(Call& call) {
  const Tensor& a = call.tensor(0);
  const int64_t m = a.size(0);
  by_type(a, [&](auto* t) {
    using T = TYPE_OF(t);
    Product<T> parts[3];
    for (int i = 0; i < 3; i++) {
      const Tensor& packed = call.tensor(1 + i);
      const int64_t n = call.integer(4 + i);
      check_packed(a, packed, n);
      if (call.given(7 + i)) expect_sizes("bias", call.tensor(7 + i), {n});
      const Tensor y = call.result({m, n}, a.scalar_type());
      parts[i] = {data<T>(packed), call.given(7 + i) ? data<T>(call.tensor(7 + i)) : nullptr, data<T>(y), n};
    }
    gemm_three<T>(data<T>(a), parts, m, a.size(1));
  });
}

inline void gemm_add_op(Call& call) {
  const Tensor &x = call.tensor(0), &a = call.tensor(1), &packed = call.tensor(2);
  expect_dimensions("x", x, 2);
  const int64_t m = a.size(0), n = x.size(1);
  check_packed(a, packed, n);
  expect_sizes("x", x, {m, n});
  Tensor y = call.result({m, n}, at::kFloat);
  by_type(a, [&](auto* t) {
    using T = TYPE_OF(t);
    gemm_add<T>(data<float>(x), data<T>(a), data<T>(packed), data<float>(y), m, n, a.size(1));
  });
}

inline void norm_rope_op(Call& call) {
  const Tensor &x = call.tensor(0), &weight = call.tensor(1), &table = call.tensor(3);
  const int32_t* positions = checked_positions(call.tensor(2), x, table);
  expect_sizes("weight", weight, {x.size(2)});
  Tensor y = call.result_like(x), rstd = call.result({x.size(0) * x.size(1)}, at::kFloat);
  by_type(x, [&](auto* t) {
    using T = TYPE_OF(t);
    norm_rope(data<T>(x), data<T>(weight), call.number(4), call.number(5), positions, data<float>(table), data<T>(y),
              data<float>(rstd), x.size(0), x.size(1), x.size(2));
  });
}

inline void rope_write_kv_op(Call& call) {
  const Tensor &k = call.tensor(0), &v = call.tensor(1), &rotary = call.tensor(2);
  const Tensor &k_pages = call.tensor(3), &v_pages = call.tensor(4), &table = call.tensor(5);
  const AttentionShape a = attention_shape(call, k, k.size(1), v.size(2), 6, false);
  checked_positions(call.tensor(7), k, rotary);
  expect_sizes("v", v, {a.tokens, a.kv_heads, a.v_dim});
  check_pages(a, k_pages, v_pages);
  const int32_t* pages = checked_table(a, table, k_pages.size(0), true);
  by_type(k, [&](auto* t) {
    using T = TYPE_OF(t);
    rope_write_kv(data<T>(k), data<T>(v), data<float>(rotary), data<T>(k_pages), data<T>(v_pages), pages,
                  table.size(1), a);
  });
}

inline void register_fused(torch::Library& m) {
  OPERATOR(m, gemm_gated);
  OPERATOR(m, gemm_activation);
  OPERATOR(m, gemm_three);
  OPERATOR_OVER(m, gemm_add);
  OPERATOR(m, norm_rope);
  IN_PLACE(m, rope_write_kv);
}

}  // namespace lockstep
