// Norms as operators, alone and with the residual sum before them.
#pragma once

#include "call.h"

namespace lockstep {

// Calls f(X*, T*) for the types of a norm: x, and y as the weight is; x is never narrower than y.
template <typename F>
void norm_types(const Tensor& x, const Tensor& weight, F f) {
  by_type(weight, [&](auto* t) {
    if (x.scalar_type() == at::kFloat)
      f((float*)nullptr, t);
    else
      f(t, t);
  });
}

struct NormSize {
  int64_t rows, d;
  NormSize(const Tensor& x, const Tensor& weight) : d(x.size(-1)) {
    TORCH_CHECK(d > 0, "norm of rows without an element: ", x.sizes());
    rows = x.numel() / d;
    expect_sizes("weight", weight, {d});
  }
};

inline void rms_norm_op(Call& call) {
  const Tensor &x = call.tensor(0), &weight = call.tensor(1);
  const NormSize n(x, weight);
  Tensor y = call.result(x.sizes(), weight.scalar_type()), rstd = call.result({n.rows}, at::kFloat);
  norm_types(x, weight, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    rms_norm<X, T>(data<X>(x), data<T>(weight), call.number(2), call.number(3), data<T>(y), data<float>(rstd), n.rows,
                   n.d, {});
  });
}

inline void rms_norm_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &x = call.tensor(1), &weight = call.tensor(2), &rstd = call.tensor(3);
  const NormSize n(x, weight);
  expect_sizes("dy", dy, x.sizes());
  expect_sizes("rstd", rstd, {n.rows});
  Tensor dx = call.result_like(x), dw = call.result({n.d}, at::kFloat);
  norm_types(x, weight, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    rms_norm_backward<X, T>(data<T>(dy), data<X>(x), data<T>(weight), call.number(4), data<float>(rstd), data<X>(dx),
                            data<float>(dw), n.rows, n.d, {});
  });
}

inline void rms_norm_weight_gradient_op(Call& call) {
  const Tensor &dy = call.tensor(0), &x = call.tensor(1), &rstd = call.tensor(2), &before = call.tensor(3);
  const NormSize n(x, before);
  expect_sizes("dy", dy, x.sizes());
  expect_sizes("rstd", rstd, {n.rows});
  Tensor dw = call.result({n.d}, at::kFloat);
  norm_types(x, dy, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    rms_norm_weight_gradient<X, T>(data<T>(dy), data<X>(x), data<float>(rstd), data<float>(before), data<float>(dw),
                                   n.rows, n.d);
  });
}

inline void add_rms_norm_op(Call& call) {
  const Tensor &x = call.tensor(0), &h = call.tensor(1), &weight = call.tensor(2);
  const NormSize n(x, weight);
  expect_sizes("h", h, x.sizes());
  Tensor sum = call.result_like(x), y = call.result(x.sizes(), h.scalar_type()), rstd = call.result({n.rows}, at::kFloat);
  by_type(h, [&](auto* t) {
    using T = TYPE_OF(t);
    rms_norm<float, T>(data<float>(x), data<T>(weight), call.number(3), call.number(4), data<T>(y), data<float>(rstd),
                       n.rows, n.d, {data<T>(h), data<float>(sum)});
  });
}

inline void add_rms_norm_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &d_sum = call.tensor(1), &sum = call.tensor(2), &weight = call.tensor(3);
  const Tensor& rstd = call.tensor(4);
  const NormSize n(sum, weight);
  expect_sizes("dy", dy, sum.sizes());
  expect_sizes("d_sum", d_sum, sum.sizes());
  expect_sizes("rstd", rstd, {n.rows});
  Tensor dx = call.result_like(sum), dh = call.result_like(dy), dw = call.result({n.d}, at::kFloat);
  by_type(dy, [&](auto* t) {
    using T = TYPE_OF(t);
    rms_norm_backward<float, T>(data<T>(dy), data<float>(sum), data<T>(weight), call.number(5), data<float>(rstd),
                                data<float>(dx), data<float>(dw), n.rows, n.d, {data<float>(d_sum), data<T>(dh)});
  });
}

inline void layer_norm_op(Call& call) {
  const Tensor &x = call.tensor(0), &weight = call.tensor(1);
  const NormSize n(x, weight);
  if (call.given(2)) expect_sizes("bias", call.tensor(2), {n.d});
  Tensor y = call.result(x.sizes(), weight.scalar_type());
  Tensor mean = call.result({n.rows}, at::kFloat), rstd = call.result({n.rows}, at::kFloat);
  norm_types(x, weight, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    layer_norm<X, T>(data<X>(x), data<T>(weight), call.given(2) ? data<T>(call.tensor(2)) : nullptr, call.number(3),
                     data<T>(y), data<float>(mean), data<float>(rstd), n.rows, n.d, {});
  });
}

inline void layer_norm_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &x = call.tensor(1), &weight = call.tensor(2);
  const Tensor &mean = call.tensor(3), &rstd = call.tensor(4);
  const NormSize n(x, weight);
  expect_sizes("dy", dy, x.sizes());
  expect_sizes("mean", mean, {n.rows});
  expect_sizes("rstd", rstd, {n.rows});
  Tensor dx = call.result_like(x), dw = call.result({n.d}, at::kFloat), db = call.result({n.d}, at::kFloat);
  norm_types(x, weight, [&](auto* wide, auto* t) {
    using X = TYPE_OF(wide);
    using T = TYPE_OF(t);
    layer_norm_backward<X, T>(data<T>(dy), data<X>(x), data<T>(weight), data<float>(mean), data<float>(rstd),
                              data<X>(dx), data<float>(dw), data<float>(db), n.rows, n.d, {});
  });
}

inline void add_layer_norm_op(Call& call) {
  const Tensor &x = call.tensor(0), &h = call.tensor(1), &weight = call.tensor(2);
  const NormSize n(x, weight);
  expect_sizes("h", h, x.sizes());
  if (call.given(3)) expect_sizes("bias", call.tensor(3), {n.d});
  Tensor sum = call.result_like(x), y = call.result(x.sizes(), h.scalar_type());
  Tensor mean = call.result({n.rows}, at::kFloat), rstd = call.result({n.rows}, at::kFloat);
  by_type(h, [&](auto* t) {
    using T = TYPE_OF(t);
    layer_norm<float, T>(data<float>(x), data<T>(weight), call.given(3) ? data<T>(call.tensor(3)) : nullptr,
                         call.number(4), data<T>(y), data<float>(mean), data<float>(rstd), n.rows, n.d,
                         {data<T>(h), data<float>(sum)});
  });
}

inline void add_layer_norm_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &d_sum = call.tensor(1), &sum = call.tensor(2), &weight = call.tensor(3);
  const Tensor &mean = call.tensor(4), &rstd = call.tensor(5);
  const NormSize n(sum, weight);
  expect_sizes("dy", dy, sum.sizes());
  expect_sizes("d_sum", d_sum, sum.sizes());
  expect_sizes("mean", mean, {n.rows});
  expect_sizes("rstd", rstd, {n.rows});
  Tensor dx = call.result_like(sum), dh = call.result_like(dy);
  Tensor dw = call.result({n.d}, at::kFloat), db = call.result({n.d}, at::kFloat);
  by_type(dy, [&](auto* t) {
    using T = TYPE_OF(t);
    layer_norm_backward<float, T>(data<T>(dy), data<float>(sum), data<T>(weight), data<float>(mean), data<float>(rstd),
                                  data<float>(dx), data<float>(dw), data<float>(db), n.rows, n.d,
                                  {data<float>(d_sum), data<T>(dh)});
  });
}

inline void register_norm(torch::Library& m) {
  OPERATOR(m, rms_norm);
  OPERATOR(m, rms_norm_backward);
  OPERATOR(m, rms_norm_weight_gradient);
  OPERATOR(m, add_rms_norm);
  OPERATOR(m, add_rms_norm_backward);
  OPERATOR(m, layer_norm);
  OPERATOR(m, layer_norm_backward);
  OPERATOR(m, add_layer_norm);
  OPERATOR(m, add_layer_norm_backward);
}

}  // namespace lockstep
