// Mixture of experts as operators.
#pragma once

#include "call.h"
#include "moe.h"

namespace lockstep {

inline void check_indices(const char* what, const Tensor& indices, int64_t bound) {
  const int32_t* at = data<int32_t>(indices);
  for (int64_t i = 0; i < indices.numel(); i++)
    TORCH_CHECK(at[i] >= 0 && at[i] < bound, what, ": ", at[i], " is not below ", bound);
}

inline void route_op(Call& call) {
  const Tensor& logits = call.tensor(0);
  expect_dimensions("logits", logits, 2);
  const Routing r{logits.size(1),  call.integer(2), call.flag(3), call.flag(4),
                  call.integer(5), call.integer(6), call.flag(7), call.number(8)};
  TORCH_CHECK(r.groups >= 1 && r.experts % r.groups == 0, r.experts, " experts do not divide into ", r.groups,
              " groups");
  TORCH_CHECK(r.top_groups >= 1 && r.top_groups <= r.groups, r.top_groups, " of ", r.groups, " groups");
  const int64_t there = r.experts / r.groups * r.top_groups;
  TORCH_CHECK(r.top_k >= 1 && r.top_k <= there, r.top_k, " of ", there, " experts");
  if (call.given(1)) expect_sizes("bias", call.tensor(1), {r.experts});
  const float* bias = call.given(1) ? data<float>(call.tensor(1)) : nullptr;
  const int64_t tokens = logits.size(0);
  Tensor weights = call.result({tokens, r.top_k}, at::kFloat), chosen = call.result({tokens, r.top_k}, at::kInt);
  route(data<float>(logits), bias, r, tokens, data<int32_t>(chosen), data<float>(weights));
}

inline void route_backward_op(Call& call) {
  const Tensor &d_weights = call.tensor(0), &logits = call.tensor(1), &chosen = call.tensor(2);
  expect_dimensions("logits", logits, 2);
  expect_dimensions("chosen", chosen, 2);
  expect_sizes("d_weights", d_weights, {logits.size(0), chosen.size(1)});
  expect_sizes("chosen", chosen, d_weights.sizes());
  check_indices("chosen", chosen, logits.size(1));
  const Routing r{logits.size(1), chosen.size(1), call.flag(3), call.flag(4), 1, 1, false, call.number(5)};
  Tensor d = call.result_like(logits);
  route_backward(data<float>(d_weights), data<float>(logits), data<int32_t>(chosen), r, logits.size(0), data<float>(d));
}

inline void softmax_sums_op(Call& call) {
  const Tensor& logits = call.tensor(0);
  expect_dimensions("logits", logits, 2);
  Tensor sums = call.result({logits.size(1)}, at::kFloat);
  softmax_sums(data<float>(logits), logits.size(0), logits.size(1), data<float>(sums));
}

inline void balance_share_op(Call& call) {
  const std::vector<Tensor> offsets = call.tensors(0);
  TORCH_CHECK(!offsets.empty(), "balance_share of no layer");
  const int64_t experts = offsets[0].numel() - 1, rows = call.integer(1);
  TORCH_CHECK(rows > 0, "balance_share of ", rows, " rows");
  std::vector<const int32_t*> layers;
  for (const Tensor& one : offsets) {
    expect_sizes("offsets", one, {experts + 1});
    layers.push_back(data<int32_t>(one));
  }
  Tensor share = call.result({experts}, at::kFloat);
  balance_share(layers, experts, rows, data<float>(share));
}

inline void softmax_sums_backward_op(Call& call) {
  const Tensor &d_sums = call.tensor(0), &logits = call.tensor(1);
  expect_dimensions("logits", logits, 2);
  expect_sizes("d_sums", d_sums, {logits.size(1)});
  Tensor d = call.result_like(logits);
  softmax_sums_backward(data<float>(d_sums), data<float>(logits), logits.size(0), logits.size(1), data<float>(d));
}

inline void group_op(Call& call) {
  const Tensor& chosen = call.tensor(0);
  expect_dimensions("chosen", chosen, 2);
  const int64_t tokens = chosen.size(0), top_k = chosen.size(1), experts = call.integer(1);
  const int32_t* ids = data<int32_t>(chosen);
  for (int64_t i = 0; i < tokens * top_k; i++)
    TORCH_CHECK(ids[i] >= 0 && ids[i] < experts, "expert ", ids[i], " is not one of ", experts);
  Tensor offsets = call.result({experts + 1}, at::kInt), rows = call.result({tokens * top_k}, at::kInt);
  Tensor slots = call.result_like(chosen);
  group(ids, tokens, top_k, experts, data<int32_t>(offsets), data<int32_t>(rows), data<int32_t>(slots));
}

inline void dispatch_op(Call& call) {
  const Tensor &x = call.tensor(0), &rows = call.tensor(1);
  expect_dimensions("tokens", x, 2);
  expect_dimensions("rows", rows, 1);
  check_indices("rows", rows, x.size(0));
  Tensor y = call.result({rows.size(0), x.size(1)}, x.scalar_type());
  by_type(x, [&](auto* t) {
    using T = TYPE_OF(t);
    dispatch(data<T>(x), data<int32_t>(rows), data<T>(y), rows.size(0), x.size(1));
  });
}

inline void dispatch_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &slots = call.tensor(1);
  expect_dimensions("rows of experts", dy, 2);
  expect_dimensions("slots", slots, 2);
  check_indices("slots", slots, dy.size(0));
  Tensor dx = call.result({slots.size(0), dy.size(1)}, dy.scalar_type());
  by_type(dy, [&](auto* t) {
    using T = TYPE_OF(t);
    dispatch_backward(data<T>(dy), data<int32_t>(slots), data<T>(dx), slots.size(0), slots.size(1), dy.size(1));
  });
}

inline void combine_op(Call& call) {
  const Tensor &y = call.tensor(0), &weights = call.tensor(1), &slots = call.tensor(2);
  expect_dimensions("rows of experts", y, 2);
  expect_dimensions("slots", slots, 2);
  expect_sizes("weights", weights, slots.sizes());
  check_indices("slots", slots, y.size(0));
  const int64_t tokens = slots.size(0), d = y.size(1);
  Tensor out = call.result({tokens, d}, y.scalar_type());
  by_type(y, [&](auto* t) {
    using T = TYPE_OF(t);
    combine(data<T>(y), data<float>(weights), data<int32_t>(slots), data<T>(out), tokens, slots.size(1), d);
  });
}

inline void combine_backward_op(Call& call) {
  const Tensor &d_out = call.tensor(0), &y = call.tensor(1), &weights = call.tensor(2), &slots = call.tensor(3);
  expect_dimensions("slots", slots, 2);
  expect_sizes("weights", weights, slots.sizes());
  expect_dimensions("rows of tokens", d_out, 2);
  expect_sizes("rows of tokens", d_out, {slots.size(0), d_out.size(1)});
  expect_sizes("y", y, {slots.numel(), d_out.size(1)});
  check_indices("slots", slots, y.size(0));
  Tensor dy = call.result_like(y), dw = call.result_like(weights);
  by_type(y, [&](auto* t) {
    using T = TYPE_OF(t);
    combine_backward(data<T>(d_out), data<T>(y), data<float>(weights), data<int32_t>(slots), data<T>(dy),
                     data<float>(dw), slots.size(0), slots.size(1), y.size(1));
  });
}

// The groups' bounds, checked against the rows [rows, k] and the number of matrices.
inline const int32_t* bounds(const Tensor& offsets, const Tensor& x, int64_t experts) {
  expect_dimensions("rows of experts", x, 2);
  TORCH_CHECK(experts > 0, "a grouped product with no expert");
  const int64_t rows = x.size(0);
  const int32_t* at = data<int32_t>(offsets);
  expect_sizes("offsets", offsets, {experts + 1});
  TORCH_CHECK(at[0] == 0 && at[experts] == rows, "offsets from ", at[0], " to ", at[experts], " for ", rows, " rows");
  for (int64_t e = 0; e < experts; e++) TORCH_CHECK(at[e] <= at[e + 1], "offsets fall at ", e);
  return at;
}

template <typename T>
std::vector<const T*> pointers(const std::vector<Tensor>& list) {
  std::vector<const T*> found;
  for (const Tensor& x : list) {
    expect_sizes("an expert's matrix", x, list[0].sizes());
    found.push_back(data<T>(x));
  }
  return found;
}

inline void grouped_gemm_op(Call& call) {
  const Tensor &a = call.tensor(0), &offsets = call.tensor(1);
  const std::vector<Tensor> packed = call.tensors(2);
  const int32_t* at = bounds(offsets, a, packed.size());
  const int64_t m = a.size(0), k = a.size(1), n = call.integer(3);
  expect_sizes("packed", packed[0], {panels(n), k, PANEL});
  Tensor y = call.result({m, n}, a.scalar_type());
  by_type(a, [&](auto* t) {
    using T = TYPE_OF(t);
    const auto list = pointers<T>(packed);
    grouped_gemm<T, T>(data<T>(a), at, list.size(), list.data(), data<T>(y), n, k);
  });
}

inline void grouped_product_op(Call& call) {
  const Tensor &a = call.tensor(0), &offsets = call.tensor(1);
  const std::vector<Tensor> weights = call.tensors(2);
  const bool by_rows = call.flag(3);
  const int32_t* at = bounds(offsets, a, weights.size());
  expect_dimensions("an expert's matrix", weights[0], 2);
  const int64_t m = a.size(0), k = a.size(1), n = weights[0].size(by_rows ? 1 : 0);
  TORCH_CHECK(weights[0].size(by_rows ? 0 : 1) == k, "rows of ", k, " with matrices ", weights[0].sizes());
  Tensor y = call.result({m, n}, a.scalar_type());
  by_type(weights[0], [&](auto* s) {
    by_type(a, [&](auto* t) {
      using S = TYPE_OF(s);
      using T = TYPE_OF(t);
      const auto list = pointers<S>(weights);
      grouped_product<S, T, T>(data<T>(a), at, list.size(), list.data(), by_rows, data<T>(y), n, k);
    });
  });
}

inline void grouped_gated_op(Call& call) {
  const Tensor &a = call.tensor(0), &offsets = call.tensor(1);
  const std::vector<Tensor> gates = call.tensors(2), ups = call.tensors(3);
  const int32_t* at = bounds(offsets, a, gates.size());
  const int64_t m = a.size(0), k = a.size(1), n = call.integer(4);
  const bool keep = call.flag(6);
  TORCH_CHECK(gates.size() == ups.size(), gates.size(), " gates for ", ups.size(), " ups");
  expect_sizes("gate", gates[0], {panels(n), k, PANEL});
  expect_sizes("up", ups[0], {panels(n), k, PANEL});
  Tensor y = call.result({m, n}, a.scalar_type());
  Tensor gate = call.result({keep ? m : 0, n}, a.scalar_type()), up = call.result_like(gate);
  by_type(a, [&](auto* t) {
    using T = TYPE_OF(t);
    grouped_gated<T>(data<T>(a), at, gates.size(), pointers<T>(gates).data(), pointers<T>(ups).data(),
                     int(call.integer(5)), data<T>(y), keep ? data<T>(gate) : nullptr, keep ? data<T>(up) : nullptr, n,
                     k);
  });
}

inline void grouped_gated_product_op(Call& call) {
  const Tensor &a = call.tensor(0), &offsets = call.tensor(1);
  const std::vector<Tensor> gates = call.tensors(2), ups = call.tensors(3);
  const int32_t* at = bounds(offsets, a, gates.size());
  expect_dimensions("an expert's matrix", gates[0], 2);
  const int64_t m = a.size(0), k = a.size(1), n = gates[0].size(0);
  const bool keep = call.flag(5);
  TORCH_CHECK(gates.size() == ups.size(), gates.size(), " gates for ", ups.size(), " ups");
  expect_sizes("gate", gates[0], {n, k});
  expect_sizes("up", ups[0], {n, k});
  Tensor y = call.result({m, n}, a.scalar_type());
  Tensor gate = call.result({keep ? m : 0, n}, a.scalar_type()), up = call.result_like(gate);
  by_type(gates[0], [&](auto* s) {
    by_type(a, [&](auto* t) {
      using S = TYPE_OF(s);
      using T = TYPE_OF(t);
      grouped_gated_product<S, T>(data<T>(a), at, gates.size(), pointers<S>(gates).data(), pointers<S>(ups).data(),
                                  int(call.integer(4)), data<T>(y), keep ? data<T>(gate) : nullptr,
                                  keep ? data<T>(up) : nullptr, n, k);
    });
  });
}

inline void grouped_weight_gradient_op(Call& call) {
  const Tensor &dy = call.tensor(0), &x = call.tensor(1), &offsets = call.tensor(2);
  const int64_t experts = offsets.size(0) - 1;
  const int32_t* at = bounds(offsets, x, experts);
  expect_dimensions("dy", dy, 2);
  const int64_t n = dy.size(1), k = x.size(1);
  TORCH_CHECK(dy.size(0) == x.size(0), dy.size(0), " rows of dy for ", x.size(0));
  Tensor dw = call.result({experts, n, k}, at::kFloat);
  by_type(dy, [&](auto* t) {
    using T = TYPE_OF(t);
    grouped_weight_gradient(data<T>(dy), data<T>(x), at, experts, data<float>(dw), n, k);
  });
}

inline void register_moe(torch::Library& m) {
  OPERATOR(m, route);
  OPERATOR(m, route_backward);
  OPERATOR(m, softmax_sums);
  OPERATOR(m, softmax_sums_backward);
  OPERATOR(m, balance_share);
  OPERATOR(m, group);
  OPERATOR(m, dispatch);
  OPERATOR(m, dispatch_backward);
  OPERATOR(m, combine);
  OPERATOR(m, combine_backward);
  OPERATOR(m, grouped_gemm);
  OPERATOR(m, grouped_product);
  OPERATOR(m, grouped_gated);
  OPERATOR(m, grouped_gated_product);
  OPERATOR(m, grouped_weight_gradient);
}

}  // namespace lockstep
