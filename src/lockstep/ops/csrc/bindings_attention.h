// Causal attention and the KV pages as operators.
#pragma once

#include "batch_checks.h"
#include "call.h"

namespace lockstep {

// at: where starts and positions, and if `scored` scale, window and softcap after them, stand in the schema.
inline AttentionShape attention_shape(const Call& call, const Tensor& q, int64_t kv_heads, int64_t v_dim, size_t at,
                                      bool scored) {
  const Tensor &starts = call.tensor(at), &positions = call.tensor(at + 1);
  expect_dimensions("heads", q, 3);
  TORCH_CHECK(q.size(2) > 0 && q.size(2) % 16 == 0 && v_dim > 0 && v_dim % 16 == 0,
              "widths of heads must be multiples of 16, got ", q.sizes(), " and ", v_dim);
  TORCH_CHECK(kv_heads > 0 && q.size(1) > 0 && q.size(1) % kv_heads == 0, q.size(1), " heads do not divide into ",
              kv_heads, " kv heads");
  expect_sizes("positions", positions, {q.size(0)});
  AttentionShape a{q.size(0), checked_sequences(starts, q.size(0)), q.size(1), kv_heads, q.size(2), v_dim,
                   data<int32_t>(starts), data<int32_t>(positions), 1.0f, 0, 0.0f};
  if (scored) {
    a.scale = call.number(at + 2);
    a.window = call.integer(at + 3);
    a.softcap = call.number(at + 4);
    TORCH_CHECK(a.window >= 0, "window is ", a.window, ": expected a number of keys, or 0 for all");
    TORCH_CHECK(a.softcap >= 0, "softcap is ", a.softcap, ": expected a bound above 0, or 0 for none");
  }
  return a;
}

inline void check_pages(const AttentionShape& a, const Tensor& k_pages, const Tensor& v_pages) {
  expect_sizes("k_pages", k_pages, {k_pages.size(0), a.kv_heads, a.dim, BLOCK});
  expect_sizes("v_pages", v_pages, {k_pages.size(0), a.kv_heads, BLOCK, a.v_dim});
}

inline void write_kv_op(Call& call) {
  const Tensor &k = call.tensor(0), &v = call.tensor(1), &table = call.tensor(4);
  const Tensor &k_pages = call.tensor(2), &v_pages = call.tensor(3);
  expect_dimensions("values", v, 3);
  const AttentionShape a = attention_shape(call, k, k.size(1), v.size(2), 5, false);
  expect_sizes("v", v, {a.tokens, a.kv_heads, a.v_dim});
  check_pages(a, k_pages, v_pages);
  const int32_t* pages = checked_table(a, table, k_pages.size(0), true);
  by_type(k, [&](auto* t) {
    using T = TYPE_OF(t);
    write_kv(data<T>(k), data<T>(v), data<T>(k_pages), data<T>(v_pages), pages, table.size(1), a);
  });
}

inline void attention_paged_op(Call& call) {
  const Tensor &q = call.tensor(0), &k_pages = call.tensor(1), &v_pages = call.tensor(2), &table = call.tensor(3);
  const AttentionShape a = attention_shape(call, q, k_pages.size(1), v_pages.size(3), 4, true);
  check_pages(a, k_pages, v_pages);
  const int32_t* pages = checked_table(a, table, k_pages.size(0), false);
  Tensor out = call.result({a.tokens, a.heads, a.v_dim}, q.scalar_type());
  by_type(q, [&](auto* t) {
    using T = TYPE_OF(t);
    attention_paged(data<T>(q), data<T>(k_pages), data<T>(v_pages), pages, table.size(1), data<T>(out), a);
  });
}

inline void attention_packed_op(Call& call) {
  const Tensor &q = call.tensor(0), &k = call.tensor(1), &v = call.tensor(2);
  expect_dimensions("keys", k, 3);
  expect_dimensions("values", v, 3);
  const AttentionShape a = attention_shape(call, q, k.size(1), v.size(2), 3, true);
  check_packed_positions(a);
  expect_sizes("k", k, {a.tokens, a.kv_heads, a.dim});
  expect_sizes("v", v, {a.tokens, a.kv_heads, a.v_dim});
  Tensor out = call.result({a.tokens, a.heads, a.v_dim}, q.scalar_type());
  Tensor lse = call.result({a.tokens, a.heads}, at::kFloat);
  by_type(q, [&](auto* t) {
    using T = TYPE_OF(t);
    attention_packed(data<T>(q), data<T>(k), data<T>(v), data<T>(out), data<float>(lse), a);
  });
}

inline void attention_backward_op(Call& call) {
  const Tensor &d_out = call.tensor(0), &q = call.tensor(1), &k = call.tensor(2), &v = call.tensor(3);
  const Tensor &out = call.tensor(4), &lse = call.tensor(5);
  const AttentionShape a = attention_shape(call, q, k.size(1), v.size(2), 6, true);
  check_packed_positions(a);
  expect_sizes("k", k, {a.tokens, a.kv_heads, a.dim});
  expect_sizes("v", v, {a.tokens, a.kv_heads, a.v_dim});
  expect_sizes("d_out", d_out, {a.tokens, a.heads, a.v_dim});
  expect_sizes("out", out, d_out.sizes());
  expect_sizes("lse", lse, {a.tokens, a.heads});
  Tensor dq = call.result_like(q), dk = call.result_like(k), dv = call.result_like(v);
  by_type(q, [&](auto* t) {
    using T = TYPE_OF(t);
    attention_backward(data<T>(q), data<T>(k), data<T>(v), data<T>(out), data<float>(lse), data<T>(d_out), data<T>(dq),
                       data<T>(dk), data<T>(dv), a);
  });
}

inline void register_attention(torch::Library& m) {
  IN_PLACE(m, write_kv);
  OPERATOR(m, attention_paged);
  OPERATOR(m, attention_packed);
  OPERATOR(m, attention_backward);
}

}  // namespace lockstep
