// Attention over pages in eight bits as operators.
#pragma once

#include "bindings_attention.h"
#include "int8.h"

namespace lockstep {

// at: where the four tensors of the pages stand in the schema.
inline Int8Pages int8_pages(const Call& call, const AttentionShape& a, size_t at) {
  const Tensor &k = call.tensor(at), &v = call.tensor(at + 1);
  const Tensor &k_scale = call.tensor(at + 2), &v_scale = call.tensor(at + 3);
  check_pages(a, k, v);
  expect_sizes("k_scale", k_scale, {k.size(0), a.kv_heads, BLOCK});
  expect_sizes("v_scale", v_scale, {k.size(0), a.kv_heads, BLOCK});
  return {data<int8_t>(k), data<int8_t>(v), data<float>(k_scale), data<float>(v_scale)};
}

inline void write_kv_int8_op(Call& call) {
  const Tensor &k = call.tensor(0), &v = call.tensor(1), &table = call.tensor(6);
  const AttentionShape a = attention_shape(call, k, k.size(1), v.size(2), 7, false);
  expect_sizes("v", v, {a.tokens, a.kv_heads, a.v_dim});
  const Int8Pages pages = int8_pages(call, a, 2);
  const int32_t* in = checked_table(a, table, call.tensor(2).size(0), true);
  by_type(k, [&](auto* t) {
    using T = TYPE_OF(t);
    write_kv_int8(data<T>(k), data<T>(v), pages, in, table.size(1), a);
  });
}

inline void attention_paged_int8_op(Call& call) {
  const Tensor &q = call.tensor(0), &k_pages = call.tensor(1), &v_pages = call.tensor(2), &table = call.tensor(5);
  const AttentionShape a = attention_shape(call, q, k_pages.size(1), v_pages.size(3), 6, true);
  const Int8Pages pages = int8_pages(call, a, 1);
  const int32_t* in = checked_table(a, table, k_pages.size(0), false);
  Tensor out = call.result({a.tokens, a.heads, a.v_dim}, q.scalar_type());
  by_type(q, [&](auto* t) {
    using T = TYPE_OF(t);
    attention_paged_int8(data<T>(q), pages, in, table.size(1), data<T>(out), a);
  });
}

inline void register_int8(torch::Library& m) {
  IN_PLACE(m, write_kv_int8);
  OPERATOR(m, attention_paged_int8);
}

}  // namespace lockstep
