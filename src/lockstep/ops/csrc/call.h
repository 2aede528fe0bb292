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

// Thrown for a tensor that no kernel can read; `run` says which argument it is.
struct WrongTensor {
  const at::TensorImpl* tensor;
  std::string why;
};
[[noreturn]] inline void refuse(const Tensor& x, const std::string& why) {
  throw WrongTensor{x.unsafeGetTensorImpl(), why};
}
inline std::string name_of(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

template <typename T>
T* data(const Tensor& x) {
  const auto type = x.scalar_type();
  if (type != Element<T>::type)
    refuse(x, "is " + name_of(type) + ": expected " + name_of(Element<T>::type) + ", give it converted by .to()");
  if (!x.is_contiguous()) refuse(x, "is not contiguous: give contiguous() of it");
  TORCH_CHECK(x.numel() == 0 || x.storage().data(), "a tensor ", x.sizes(), " whose memory was given back");
  return static_cast<T*>(x.data_ptr());
}

inline void expect_sizes(const char* what, const Tensor& x, at::IntArrayRef sizes) {
  TORCH_CHECK(x.sizes() == sizes, what, ": expected ", sizes, ", got ", x.sizes());
}

inline void expect_dimensions(const char* what, const Tensor& x, int64_t count) {
  TORCH_CHECK(x.dim() == count, what, ": expected ", count, " dimensions, got ", x.sizes());
}

class Call {
 public:
  // The arguments: inputs, then, where the form is `.out`, the tensors to write into.
  Call(const c10::IValue* const* arguments, size_t inputs, bool out)
      : arguments_(arguments), inputs_(inputs), out_(out) {}

  const Tensor& tensor(size_t i) const { return arguments_[i]->toTensor(); }
  std::vector<Tensor> tensors(size_t i) const { return arguments_[i]->toTensorVector(); }
  bool given(size_t i) const { return !arguments_[i]->isNone(); }
  int64_t integer(size_t i) const { return arguments_[i]->toInt(); }
  float number(size_t i) const { return float(arguments_[i]->toDouble()); }
  bool flag(size_t i) const { return arguments_[i]->toBool(); }
  at::ScalarType type(size_t i) const { return arguments_[i]->toScalarType(); }

  // The next result, uninitialised.
  Tensor result(at::IntArrayRef sizes, at::ScalarType type) {
    if (!out_) return results_.emplace_back(at::detail::empty_cpu(sizes, type));
    const Tensor& y = tensor(inputs_ + written_++);
    expect_sizes("out", y, sizes);
    TORCH_CHECK(y.scalar_type() == type, "out: expected ", name_of(type), ", got ", name_of(y.scalar_type()));
    TORCH_CHECK(y.is_contiguous(), "out: expected a contiguous tensor");
    return y;
  }
  // A result that nobody reads: memory to work in. The caller's may be larger.
  Tensor workspace(int64_t bytes) {
    if (out_) {
      const Tensor& y = tensor(inputs_ + written_);
      TORCH_CHECK(y.dim() == 1 && y.numel() >= bytes, "out: expected at least ", bytes, " bytes, got ", y.sizes());
      bytes = y.numel();
    }
    return result({bytes}, at::kByte);
  }
  Tensor result_like(const Tensor& x) { return result(x.sizes(), x.scalar_type()); }

  // What was allocated, or the caller's tensors.
  std::vector<Tensor> results() {
    if (!out_) return {results_.begin(), results_.end()};
    std::vector<Tensor> given;
    for (size_t i = 0; i < written_; i++) given.push_back(tensor(inputs_ + i));
    return given;
  }

 private:
  const c10::IValue* const* arguments_;
  size_t inputs_, written_ = 0;
  bool out_;
  c10::SmallVector<Tensor, 6> results_;
};

// Calls f(T*) with a null pointer of the element type: float or bf16.
template <typename F>
auto by_type(at::ScalarType type, F f) {
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "the compute dtype is ", name_of(type),
              ": expected float32 or bfloat16, or compute with operators(\"fast\")");
  return type == at::kFloat ? f((float*)nullptr) : f((bf16*)nullptr);
}
template <typename F>
auto by_type(const Tensor& x, F f) {
  const auto type = x.scalar_type();
  if (type != at::kFloat && type != at::kBFloat16)
    refuse(x, "is " + name_of(type) + ": expected float32 or bfloat16, give it converted by .to(), or compute with "
              "operators(\"fast\")");
  return by_type(type, f);
}
#define TYPE_OF(pointer) std::remove_pointer_t<decltype(pointer)>

// A kernel as a program calls it, past the dispatcher: the `.out` form of an operator, or one that works in place.
using Kernel = void (*)(const c10::IValue* const* arguments, size_t inputs);

// By name, with its overload after a dot; null where there is none.
void add_kernel(const std::string& name, Kernel kernel);
Kernel kernel_named(const std::string& name);

template <void (*body)(Call&)>
void run_into(const c10::IValue* const* arguments, size_t inputs) {
  Call call(arguments, inputs, true);
  try {
    body(call);
  } catch (const WrongTensor& wrong) {
    TORCH_CHECK(false, "a tensor ", wrong.why);
  }
}

// The operator and its argument that holds a tensor, before what is wrong with it.
inline std::string place_of(const at::TensorImpl* tensor, const c10::FunctionSchema& schema,
                            const c10::SmallVector<const c10::IValue*, 16>& arguments) {
  auto holds = [&](const c10::IValue& value) {
    if (value.isTensor()) return value.toTensor().unsafeGetTensorImpl() == tensor;
    if (!value.isTensorList()) return false;
    for (const Tensor& x : value.toTensorVector())
      if (x.unsafeGetTensorImpl() == tensor) return true;
    return false;
  };
  for (size_t i = 0; i < arguments.size(); i++)
    if (holds(*arguments[i])) return schema.name() + ": " + schema.arguments()[i].name() + " ";
  return schema.name() + ": a tensor ";
}

// Whether two tensors have memory in common.
inline bool overlap(const Tensor& x, const Tensor& y) {
  const char *a = static_cast<const char*>(x.data_ptr()), *b = static_cast<const char*>(y.data_ptr());
  return x.numel() && y.numel() && a < b + y.nbytes() && b < a + x.nbytes();
}

// What an operator writes must lie apart from what it reads: it would read what it has written.
inline void check_apart(const c10::FunctionSchema& schema, const c10::SmallVector<const c10::IValue*, 16>& arguments) {
  auto check = [&](size_t written, size_t other, const Tensor& y) {
    TORCH_CHECK(!overlap(arguments[written]->toTensor(), y), schema.name(), ": ", schema.arguments()[written].name(),
                " lies in the memory of ", schema.arguments()[other].name(), ", which is read while it is written");
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for (size_t j = 0; j < arguments.size(); j++) {
      if (i == j) continue;
      if (arguments[j]->isTensor()) check(i, j, arguments[j]->toTensor());
      if (arguments[j]->isTensorList())
        for (const Tensor& y : arguments[j]->toTensorVector()) check(i, j, y);
    }
  }
}

// Forms of an operator: its results are new, or the caller's; or it has none and writes into arguments. ANYWHERE: as
// RESULTS_GIVEN, and they may lie where an argument does.
enum Form { RESULTS_NEW, RESULTS_GIVEN, ANYWHERE, NO_RESULTS };

template <void (*body)(Call&), Form form>
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr bool out = form == RESULTS_GIVEN || form == ANYWHERE;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  c10::SmallVector<const c10::IValue*, 16> arguments;
  for (size_t i = 0; i < count; i++) arguments.push_back(&(*stack)[first + i]);
  if constexpr (form == RESULTS_GIVEN || form == NO_RESULTS) check_apart(schema, arguments);
  Call call(arguments.data(), count - (out ? schema.returns().size() : 0), out);
  try {
    body(call);
  } catch (const WrongTensor& wrong) {
    TORCH_CHECK(false, place_of(wrong.tensor, schema, arguments), wrong.why);
  }
  std::vector<Tensor> results = call.results();
  torch::jit::drop(*stack, count);
  for (Tensor& y : results) stack->emplace_back(std::move(y));
}

// Of an operator without results, for PyTorch's key of tensors that are the negative of their memory (`torch._neg_view`).
// Its own fallback hands a kernel copies, and expects back what was written; so here what is written is refused.
inline void without_negatives(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_neg()) continue;
    const auto* alias = arguments[i].alias_info();
    TORCH_CHECK(!alias || !alias->isWrite(), op.schema().name(), ": ", arguments[i].name(),
                " is written, but it is the negative of its memory (torch._neg_view): give resolve_neg() of it");
    value = value.toTensor().resolve_neg();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative), stack);
}

// The names of operators without results.
std::vector<const char*>& without_results();

// Register `NAME_op` as lockstep::NAME and lockstep::NAME.out; OPERATOR_OVER where a result may lie where an argument
// does, IN_PLACE for an operator without results.
#define WITH_RESULTS(m, name, form)                                                             \
  m.impl(#name, torch::CppFunction::makeFromBoxedFunction<&run<name##_op, RESULTS_NEW>>());     \
  m.impl(#name ".out", torch::CppFunction::makeFromBoxedFunction<&run<name##_op, form>>());     \
  add_kernel("lockstep::" #name ".out", &run_into<name##_op>)
#define OPERATOR(m, name) WITH_RESULTS(m, name, RESULTS_GIVEN)
#define OPERATOR_OVER(m, name) WITH_RESULTS(m, name, ANYWHERE)
#define IN_PLACE(m, name)                                                                       \
  m.impl(#name, torch::CppFunction::makeFromBoxedFunction<&run<name##_op, NO_RESULTS>>());      \
  without_results().push_back(#name);                                                           \
  add_kernel("lockstep::" #name, &run_into<name##_op>)

}  // namespace lockstep
