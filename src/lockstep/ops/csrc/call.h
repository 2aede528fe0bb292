// What a binding sees of a call: the arguments by their place in the schema, and its results.
//
// One body serves both forms of an operator: `result` allocates in the functional form and hands out the caller's
// tensor in the form `.out`. The schemas are in `ops/raw/`; arguments are numbered as they stand there.
#pragma once

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include "kernels.h"

namespace lockstep {

using at::Tensor;

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
template <>
struct Element<double> {
  static constexpr auto type = at::kDouble;
};
template <>
struct Element<int32_t> {
  static constexpr auto type = at::kInt;
};
template <>
struct Element<int64_t> {
  static constexpr auto type = at::kLong;
};
template <>
struct Element<int8_t> {
  static constexpr auto type = at::kChar;
};
template <>
struct Element<uint8_t> {
  static constexpr auto type = at::kByte;
};

template <typename T>
T* data(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == Element<T>::type, "expected ", Element<T>::type, ", got ", x.scalar_type());
  TORCH_CHECK(x.is_contiguous(), "expected a contiguous tensor");
  return static_cast<T*>(x.data_ptr());
}

inline void expect_sizes(const char* what, const Tensor& x, at::IntArrayRef sizes) {
  TORCH_CHECK(x.sizes() == sizes, what, ": expected ", sizes, ", got ", x.sizes());
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool out) : stack_(stack), out_(out) {
    arguments_ = op.schema().arguments().size();
    first_ = stack->size() - arguments_;
    inputs_ = arguments_ - (out ? op.schema().returns().size() : 0);
  }

  const Tensor& tensor(size_t i) const { return at(i).toTensor(); }
  std::vector<Tensor> tensors(size_t i) const { return at(i).toTensorVector(); }
  bool given(size_t i) const { return !at(i).isNone(); }
  int64_t integer(size_t i) const { return at(i).toInt(); }
  float number(size_t i) const { return float(at(i).toDouble()); }
  bool flag(size_t i) const { return at(i).toBool(); }
  at::ScalarType type(size_t i) const { return at(i).toScalarType(); }

  // The next result, uninitialised.
  Tensor result(at::IntArrayRef sizes, at::ScalarType type) {
    Tensor y = out_ ? at(inputs_ + results_.size()).toTensor() : Tensor(at::detail::empty_cpu(sizes, type));
    if (out_) {
      expect_sizes("out", y, sizes);
      TORCH_CHECK(y.scalar_type() == type, "out: expected ", type, ", got ", y.scalar_type());
      TORCH_CHECK(y.is_contiguous(), "out: expected a contiguous tensor");
    }
    results_.push_back(y);
    return y;
  }
  // A result that nobody reads: memory to work in. The caller's may be larger.
  Tensor workspace(int64_t bytes) {
    if (out_) {
      const Tensor& y = at(inputs_ + results_.size()).toTensor();
      TORCH_CHECK(y.dim() == 1 && y.numel() >= bytes, "out: expected at least ", bytes, " bytes, got ", y.sizes());
      bytes = y.numel();
    }
    return result({bytes}, at::kByte);
  }
  Tensor result_like(const Tensor& x) { return result(x.sizes(), x.scalar_type()); }

  void finish() {
    torch::jit::drop(*stack_, arguments_);
    for (Tensor& y : results_) stack_->emplace_back(std::move(y));
  }

 private:
  const c10::IValue& at(size_t i) const { return (*stack_)[first_ + i]; }

  torch::jit::Stack* stack_;
  bool out_;
  size_t arguments_, first_, inputs_;
  c10::SmallVector<Tensor, 6> results_;
};

// Calls f(T*) with a null pointer of the element type: float or bf16.
template <typename F>
auto by_type(at::ScalarType type, F f) {
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "expected float32 or bfloat16, got ", type);
  return type == at::kFloat ? f((float*)nullptr) : f((bf16*)nullptr);
}
#define TYPE_OF(pointer) std::remove_pointer_t<decltype(pointer)>

template <void (*body)(Call&), bool out>
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack, out);
  body(call);
  call.finish();
}

// Register `NAME_op` as lockstep::NAME and lockstep::NAME.out; IN_PLACE for an operator without results.
#define OPERATOR(m, name)                                                                     \
  m.impl(#name, torch::CppFunction::makeFromBoxedFunction<&run<name##_op, false>>());         \
  m.impl(#name ".out", torch::CppFunction::makeFromBoxedFunction<&run<name##_op, true>>())
#define IN_PLACE(m, name) m.impl(#name, torch::CppFunction::makeFromBoxedFunction<&run<name##_op, false>>())

}  // namespace lockstep
