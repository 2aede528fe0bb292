// Norms, the rotation and gated activations as operators.
#pragma once

#include "call.h"

namespace lockstep {

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

inline void rms_norm_op(Call& call) {
  const Tensor &x = call.tensor(0), &weight = call.tensor(1);
  const int64_t d = x.size(-1), rows = x.numel() / d;
  expect_sizes("weight", weight, {d});
  Tensor y = call.result(x.sizes(), weight.scalar_type()), rstd = call.result({rows}, at::kFloat);
  norm_types(x, weight, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    rms_norm(data<X>(x), data<T>(weight), call.number(2), call.number(3), data<T>(y), data<float>(rstd), rows, d);
  });
}

inline void rms_norm_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &x = call.tensor(1), &weight = call.tensor(2), &rstd = call.tensor(3);
  const int64_t d = x.size(-1), rows = x.numel() / d;
  expect_sizes("dy", dy, x.sizes());
  expect_sizes("weight", weight, {d});
  expect_sizes("rstd", rstd, {rows});
  Tensor dx = call.result_like(x), dw = call.result({d}, at::kFloat);
  norm_types(x, weight, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    rms_norm_backward(data<T>(dy), data<X>(x), data<T>(weight), call.number(4), data<float>(rstd), data<X>(dx),
                      data<float>(dw), rows, d);
  });
}

inline void rope_op(Call& call) {
  const Tensor &x = call.tensor(0), &positions = call.tensor(1), &table = call.tensor(2);
  TORCH_CHECK(table.size(1) * 2 == x.size(2), "rotary table ", table.sizes(), " for heads of ", x.size(2));
  expect_sizes("positions", positions, {x.size(0)});
  const int32_t* at = data<int32_t>(positions);
  for (int64_t t = 0; t < x.size(0); t++)
    TORCH_CHECK(at[t] >= 0 && at[t] < table.size(0), "position ", at[t], " is not in the rotary table of ",
                table.size(0), " rows");
  Tensor y = call.result_like(x);
  by_type(x.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    rope(data<T>(x), at, data<float>(table), call.number(3), data<T>(y), x.size(0), x.size(1), x.size(2));
  });
}

inline void gated_op(Call& call) {
  const Tensor &gate = call.tensor(0), &up = call.tensor(1);
  expect_sizes("up", up, gate.sizes());
  Tensor y = call.result_like(gate);
  by_type(gate.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    gated(data<T>(gate), data<T>(up), int(call.integer(2)), data<T>(y), gate.numel());
  });
}

inline void gated_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &gate = call.tensor(1), &up = call.tensor(2);
  expect_sizes("dy", dy, gate.sizes());
  expect_sizes("up", up, gate.sizes());
  Tensor d_gate = call.result_like(gate), d_up = call.result_like(up);
  by_type(gate.scalar_type(), [&](auto* t) {
    using T = TYPE_OF(t);
    gated_backward(data<T>(dy), data<T>(gate), data<T>(up), int(call.integer(3)), data<T>(d_gate), data<T>(d_up),
                   gate.numel());
  });
}

inline void register_rows(torch::Library& m) {
  OPERATOR(m, rms_norm);
  OPERATOR(m, rms_norm_backward);
  OPERATOR(m, rope);
  OPERATOR(m, gated);
  OPERATOR(m, gated_backward);
}

}  // namespace lockstep
