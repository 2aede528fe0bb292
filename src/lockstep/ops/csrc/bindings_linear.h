// Products as operators.
#pragma once

#include "call.h"

namespace lockstep {

inline void pack(Call& call, bool columns) {
  const Tensor& source = call.tensor(0);
  const at::ScalarType type = call.type(1);
  TORCH_CHECK(source.dim() == 2, "expected a matrix, got ", source.sizes());
  const int64_t rows = source.size(0), width = source.size(1);
  const int64_t n = columns ? rows : width, k = columns ? width : rows;
  Tensor out = call.result({panels(n), k, PANEL}, type);
  by_type(source, [&](auto* s) {
    by_type(type, [&](auto* t) {
      using S = TYPE_OF(s);
      using T = TYPE_OF(t);
      columns ? pack_columns(data<S>(source), n, k, data<T>(out)) : pack_rows(data<S>(source), k, n, data<T>(out));
    });
  });
}
inline void pack_columns_op(Call& call) { pack(call, true); }
inline void pack_rows_op(Call& call) { pack(call, false); }

// a [m, k] with a right-hand side of n columns, as pack lays it out.
inline void check_packed(const Tensor& a, const Tensor& packed, int64_t n) {
  expect_dimensions("rows of a product", a, 2);
  TORCH_CHECK(packed.sizes() == at::IntArrayRef({panels(n), a.size(1), PANEL}), "product of ", a.sizes(),
              " with packed ", packed.sizes(), " for ", n, " columns");
}

inline void gemm_op(Call& call) {
  const Tensor &a = call.tensor(0), &packed = call.tensor(1);
  const int64_t n = call.integer(2);
  check_packed(a, packed, n);
  const int64_t m = a.size(0), k = a.size(1);
  const at::ScalarType type = call.type(4);
  if (call.given(3)) expect_sizes("bias", call.tensor(3), {n});
  Tensor y = call.result({m, n}, type);
  by_type(a, [&](auto* t) {
    using T = TYPE_OF(t);
    const T* bias = call.given(3) ? data<T>(call.tensor(3)) : nullptr;
    if (type == at::kFloat)
      gemm<T, float>(data<T>(a), k, 1, data<T>(packed), bias, data<float>(y), m, n, k, false);
    else
      gemm<T, T>(data<T>(a), k, 1, data<T>(packed), bias, data<T>(y), m, n, k, false);
  });
}

inline void transposed(const Tensor& a, const Tensor& packed, const Tensor& y, bool accumulate) {
  expect_dimensions("sums", y, 2);
  const int64_t k = a.size(0), m = a.size(1), n = y.size(1);
  TORCH_CHECK(y.size(0) == m && packed.sizes() == at::IntArrayRef({panels(n), k, PANEL}), "transposed product of ",
              a.sizes(), " with packed ", packed.sizes(), " into ", y.sizes());
  by_type(a, [&](auto* t) {
    using T = TYPE_OF(t);
    gemm<T, float>(data<T>(a), 1, m, data<T>(packed), nullptr, data<float>(y), m, n, k, accumulate);
  });
}
inline void gemm_transposed_op(Call& call) {
  const Tensor& a = call.tensor(0);
  expect_dimensions("rows of a product", a, 2);
  transposed(a, call.tensor(1), call.result({a.size(1), call.integer(2)}, at::kFloat), false);
}
inline void gemm_transposed_add_op(Call& call) {
  expect_dimensions("rows of a product", call.tensor(0), 2);
  transposed(call.tensor(0), call.tensor(1), call.tensor(2), true);
}

inline void column_sums_op(Call& call) {
  const Tensor& x = call.tensor(0);
  expect_dimensions("rows of a sum", x, 2);
  Tensor y = call.result({x.size(1)}, at::kFloat);
  by_type(x,
          [&](auto* t) { column_sums(data<TYPE_OF(t)>(x), x.size(0), x.size(1), data<float>(y)); });
}

inline void register_linear(torch::Library& m) {
  OPERATOR(m, pack_columns);
  OPERATOR(m, pack_rows);
  OPERATOR(m, gemm);
  OPERATOR(m, gemm_transposed);
  IN_PLACE(m, gemm_transposed_add);
  OPERATOR(m, column_sums);
}

}  // namespace lockstep
