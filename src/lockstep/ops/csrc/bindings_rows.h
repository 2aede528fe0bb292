// The rotation and activations as operators.
#pragma once

#include "call.h"

namespace lockstep {

// positions int32 [T] of x [T, heads, d], each a row of the rotary table [P, d / 2, 2].
inline const int32_t* checked_positions(const Tensor& positions, const Tensor& x, const Tensor& table) {
  TORCH_CHECK(x.dim() == 3 && table.dim() == 3 && table.size(1) * 2 == x.size(2) && table.size(2) == 2, "rotary table ",
              table.sizes(), " for heads ", x.sizes());
  expect_sizes("positions", positions, {x.size(0)});
  const int32_t* at = data<int32_t>(positions);
  for (int64_t t = 0; t < x.size(0); t++)
    TORCH_CHECK(at[t] >= 0 && at[t] < table.size(0), "position ", at[t], " is not in the rotary table of ",
                table.size(0), " rows");
  return at;
}

inline void rope_op(Call& call) {
  const Tensor &x = call.tensor(0), &positions = call.tensor(1), &table = call.tensor(2);
  const int32_t* at = checked_positions(positions, x, table);
  Tensor y = call.result_like(x);
  by_type(x, [&](auto* t) {
    using T = TYPE_OF(t);
    rope(data<T>(x), at, data<float>(table), call.number(3), data<T>(y), x.size(0), x.size(1), x.size(2));
  });
}

inline void activation_op(Call& call) {
  const Tensor& x = call.tensor(0);
  Tensor y = call.result_like(x);
  by_type(x, [&](auto* t) {
    using T = TYPE_OF(t);
    activation(data<T>(x), int(call.integer(1)), data<T>(y), x.numel());
  });
}

inline void activation_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &x = call.tensor(1);
  expect_sizes("dy", dy, x.sizes());
  Tensor dx = call.result_like(x);
  by_type(x, [&](auto* t) {
    using T = TYPE_OF(t);
    activation_backward(data<T>(dy), data<T>(x), int(call.integer(2)), data<T>(dx), x.numel());
  });
}

inline void gated_op(Call& call) {
  const Tensor &gate = call.tensor(0), &up = call.tensor(1);
  expect_sizes("up", up, gate.sizes());
  Tensor y = call.result_like(gate);
  by_type(gate, [&](auto* t) {
    using T = TYPE_OF(t);
    gated(data<T>(gate), data<T>(up), int(call.integer(2)), data<T>(y), gate.numel());
  });
}

inline void gated_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &gate = call.tensor(1), &up = call.tensor(2);
  expect_sizes("dy", dy, gate.sizes());
  expect_sizes("up", up, gate.sizes());
  Tensor d_gate = call.result_like(gate), d_up = call.result_like(up);
  by_type(gate, [&](auto* t) {
    using T = TYPE_OF(t);
    gated_backward(data<T>(dy), data<T>(gate), data<T>(up), int(call.integer(3)), data<T>(d_gate), data<T>(d_up),
                   gate.numel());
  });
}

inline void share_heads_op(Call& call) {
  const Tensor& x = call.tensor(0);
  expect_dimensions("rows for heads", x, 2);
  const int64_t tokens = x.size(0), d = x.size(1), heads = call.integer(1);
  TORCH_CHECK(heads > 0, "copies for ", heads, " heads: expected at least one");
  Tensor y = call.result({tokens, heads, d}, x.scalar_type());
  by_type(x, [&](auto* t) {
    using T = TYPE_OF(t);
    share_heads(data<T>(x), data<T>(y), tokens, heads, d);
  });
}

inline void share_heads_backward_op(Call& call) {
  const Tensor& dy = call.tensor(0);
  expect_dimensions("gradients of heads", dy, 3);
  Tensor dx = call.result({dy.size(0), dy.size(2)}, dy.scalar_type());
  by_type(dy, [&](auto* t) {
    using T = TYPE_OF(t);
    share_heads_backward(data<T>(dy), data<T>(dx), dy.size(0), dy.size(1), dy.size(2));
  });
}

inline void register_rows(torch::Library& m) {
  OPERATOR(m, rope);
  OPERATOR(m, activation);
  OPERATOR(m, activation_backward);
  OPERATOR(m, gated);
  OPERATOR(m, gated_backward);
  OPERATOR(m, share_heads);
  OPERATOR(m, share_heads_backward);
}

}  // namespace lockstep
