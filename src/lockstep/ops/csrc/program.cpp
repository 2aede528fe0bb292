// Programs: a flat list of operator calls over static memory, run by one call. What `compile` makes of a graph.
//
// A program holds *values* (tensors, numbers) and *calls* (an operator and the indices of its arguments). A value is
// bound from outside, constant, or derived: a view of another value, a list of values, or a whole number that grows
// with the number of rows. Sizes, strides, byte offsets and such numbers are `a + b * rows`: `resize` derives anew, so
// that one program serves every number of rows up to what its memory was planned for. Running does no allocation, no
// shape computation and no autograd: our own kernels are called as they are, other operators at the backend's kernel,
// below autograd.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <utility>

#include "call.h"

namespace lockstep {
namespace {

using at::Tensor;
using c10::IValue;

struct Affine {
  int64_t constant = 0, slope = 0;
  int64_t at(int64_t rows) const { return constant + slope * rows; }
};

const std::unordered_map<std::string, at::ScalarType> TYPES = {
    {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float64", at::kDouble}, {"float16", at::kHalf},
    {"int64", at::kLong},    {"int32", at::kInt},         {"int16", at::kShort},    {"int8", at::kChar},
    {"uint8", at::kByte},    {"bool", at::kBool},
};

at::ScalarType type_named(const std::string& name) {
  const auto found = TYPES.find(name);
  TORCH_CHECK(found != TYPES.end(), "a program holds no tensors of type ", name);
  return found->second;
}

std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> found;
  for (size_t at = 0; at < text.size();) {
    size_t end = text.find(',', at);
    if (end == std::string::npos) end = text.size();
    found.push_back(std::stoll(text.substr(at, end - at)));
    at = end + 1;
  }
  return found;
}

// "float32:2,3:" and two hexadecimal digits for each byte.
Tensor tensor_of(const std::string& text) {
  const size_t first = text.find(':'), second = text.find(':', first + 1);
  TORCH_CHECK(first != std::string::npos && second != std::string::npos, "a constant tensor is type:sizes:bytes");
  Tensor made = at::empty(numbers(text.substr(first + 1, second - first - 1)), type_named(text.substr(0, first)));
  TORCH_CHECK(made.nbytes() * 2 == text.size() - second - 1, "a constant tensor of ", made.sizes(), " with ",
              text.size() - second - 1, " digits");
  auto* bytes = static_cast<uint8_t*>(made.data_ptr());
  for (size_t i = 0; i < made.nbytes(); ++i)
    bytes[i] = uint8_t(std::stoi(text.substr(second + 1 + 2 * i, 2), nullptr, 16));
  return made;
}

// What a value is derived from.
struct Derived {
  enum Kind { VIEW, LIST, NUMBER, NUMBERS } kind;
  int64_t index;                // the value it gives
  std::vector<int64_t> bases;   // VIEW: one; LIST: the members
  at::ScalarType type;          // VIEW
  Affine offset;                // VIEW: in bytes from the base's first element; NUMBER: itself
  std::vector<Affine> sizes, strides;  // NUMBERS: `sizes` are the members

  bool grows() const {
    const auto slope = [](const Affine& one) { return one.slope != 0; };
    return offset.slope || std::any_of(sizes.begin(), sizes.end(), slope) ||
           std::any_of(strides.begin(), strides.end(), slope);
  }
};

struct Step {
  c10::OperatorHandle op;
  Kernel kernel;  // of our own operators on the CPU, else null
  int64_t first, count, inputs;  // its arguments in `arguments_`, and how many of them it does not write results into
  std::vector<int64_t> results;  // where its results are copied to: of an operator that cannot write into given memory
};

struct Recipe {
  struct Part {
    c10::OperatorHandle op;
    std::vector<int64_t> arguments, results;
  };
  int64_t places = 0;
  std::vector<Derived> views;           // bases are slots
  std::vector<int64_t> constants;       // the values; -1 for a list, whose members depend on the slots
  std::vector<std::vector<int64_t>> lists;  // their members, as slots
  std::vector<Part> calls;
};

struct Program : torch::CustomClassHolder {
  // Values that are bound from outside; returns the index of the first.
  int64_t external(const std::vector<Tensor>& tensors) {
    const int64_t first = int64_t(values_.size());
    for (const Tensor& tensor : tensors) add(IValue(tensor));
    return first;
  }

  // A constant: "n" None, "b0" "b1", "i5", "f0x1p-3", "l1,2", "dbfloat16", "sum" text, "wi5" "wf0x1p-3" a number as a tensor
  // (it takes part in no type promotion), "vfloat32:2,3:0011..." a tensor of these bytes; derived: "t3,4" a list of
  // values, "a5,7" the number 5 + 7 rows, "m5,7,4,0" the list of such numbers.
  int64_t constant(const std::string& text) {
    TORCH_CHECK(!text.empty(), "an empty constant");
    const std::string rest = text.substr(1);
    switch (text[0]) {
      case 'n': return add(IValue());
      case 'b': return add(IValue(rest == "1"));
      case 'i': return add(IValue(int64_t(std::stoll(rest))));
      case 'f': return add(IValue(std::strtod(rest.c_str(), nullptr)));
      case 'l': return add(IValue(c10::List<int64_t>(numbers(rest))));
      case 'd': return add(IValue(int64_t(type_named(rest))));
      case 's': return add(IValue(rest));
      case 'w': {
        TORCH_CHECK(rest.size() > 1, "a number as a tensor is wi or wf and the number");
        const bool whole = rest[0] == 'i';
        const at::Scalar scalar = whole ? at::Scalar(int64_t(std::stoll(rest.substr(1))))
                                        : at::Scalar(std::strtod(rest.c_str() + 1, nullptr));
        Tensor number = at::scalar_tensor(scalar, whole ? at::kLong : at::kDouble);
        number.unsafeGetTensorImpl()->set_wrapped_number(true);
        return add(IValue(number));
      }
      case 'v': return add(IValue(tensor_of(rest)));
      case 't': return derive({Derived::LIST, 0, numbers(rest), {}, {}, {}, {}});
      case 'a': {
        const auto pair = numbers(rest);
        TORCH_CHECK(pair.size() == 2, "a number of rows is a,b; got ", rest);
        return derive({Derived::NUMBER, 0, {}, {}, {pair[0], pair[1]}, {}, {}});
      }
      case 'm': {
        const auto pairs = numbers(rest);
        TORCH_CHECK(pairs.size() % 2 == 0, "a list of numbers of rows is a,b,a,b...; got ", rest);
        Derived d{Derived::NUMBERS, 0, {}, {}, {}, {}, {}};
        for (size_t i = 0; i < pairs.size(); i += 2) d.sizes.push_back({pairs[i], pairs[i + 1]});
        return derive(std::move(d));
      }
    }
    TORCH_CHECK(false, "unknown constant ", text);
  }

  // What a view is like, to be made any number of times: pairs (constant, slope) of offset, sizes and strides. Returns its
  // number.
  int64_t shape(const std::string& type, const std::vector<int64_t>& pairs) {
    shapes_.push_back(shaped(type, 0, pairs));
    return int64_t(shapes_.size()) - 1;
  }

  // A view of a value's memory, `offset` bytes further on than its shape says.
  int64_t view(int64_t base, int64_t number, int64_t offset) {
    check(base);
    TORCH_CHECK(0 <= number && number < int64_t(shapes_.size()), "shape ", number, " of ", shapes_.size());
    Derived made = shapes_[number];
    made.bases[0] = base;
    made.offset.constant += offset;
    return derive(std::move(made));
  }

  // One more call. name: with its overload after a dot, where it has one.
  void call(const std::string& name, const std::vector<int64_t>& arguments) { add_call(found(name), arguments, {}); }

  // A recipe (`compile/recipe.py`), to be appended any number of times: its operators are found and its constants made
  // once. Slots count the places, the memory, the views, the constants. Returns its number.
  int64_t recipe(int64_t places, const std::vector<std::string>& types, const std::vector<std::vector<int64_t>>& views,
                 const std::vector<std::string>& constants, const std::vector<std::string>& names,
                 const std::vector<std::vector<int64_t>>& calls, const std::vector<std::vector<int64_t>>& results) {
    TORCH_CHECK(views.size() == types.size() && calls.size() == names.size() && calls.size() == results.size(),
                "a recipe's lists differ in length");
    Recipe made;
    made.places = places;
    for (size_t i = 0; i < views.size(); ++i) {
      TORCH_CHECK(!views[i].empty(), "a view without a base");
      made.views.push_back(shaped(types[i], views[i][0], {views[i].begin() + 1, views[i].end()}));
    }
    for (const auto& text : constants) {
      const bool list = text[0] == 't';
      made.constants.push_back(list ? -1 : shared(text));
      made.lists.push_back(list ? numbers(text.substr(1)) : std::vector<int64_t>{});
    }
    for (size_t i = 0; i < calls.size(); ++i) made.calls.push_back({found(names[i]), calls[i], results[i]});
    recipes_.push_back(std::move(made));
    return int64_t(recipes_.size()) - 1;
  }

  // Views and calls of a recipe. inputs: the values of its places, then its memory, where views begin at `offset` bytes.
  void append(int64_t number, const std::vector<int64_t>& inputs, int64_t offset) {
    TORCH_CHECK(0 <= number && number < int64_t(recipes_.size()), "recipe ", number, " of ", recipes_.size());
    const Recipe& recipe = recipes_[number];
    TORCH_CHECK(int64_t(inputs.size()) == recipe.places + 1, "a recipe of ", recipe.places, " places got ",
                int64_t(inputs.size()) - 1);
    std::vector<int64_t> slots = inputs;
    auto slot = [&](int64_t i) {
      TORCH_CHECK(0 <= i && i < int64_t(slots.size()), "recipe slot ", i, " of ", slots.size());
      return slots[i];
    };
    auto each = [&](std::vector<int64_t> members) {
      for (auto& member : members) member = slot(member);
      return members;
    };
    for (Derived view : recipe.views) {
      if (view.bases[0] == recipe.places) view.offset.constant += offset;
      view.bases[0] = slot(view.bases[0]);
      slots.push_back(derive(std::move(view)));
    }
    for (size_t i = 0; i < recipe.constants.size(); ++i)
      slots.push_back(recipe.constants[i] >= 0 ? recipe.constants[i]
                                               : derive({Derived::LIST, 0, each(recipe.lists[i]), {}, {}, {}, {}}));
    for (const auto& one : recipe.calls) add_call(one.op, each(one.arguments), each(one.results));
  }

  void bind(const std::vector<int64_t>& indices, const std::vector<Tensor>& tensors) {
    TORCH_CHECK(indices.size() == tensors.size(), indices.size(), " values for ", tensors.size(), " tensors");
    for (size_t i = 0; i < indices.size(); ++i) {
      check(indices[i]);
      values_[indices[i]] = tensors[i];
      if (!dependents_[indices[i]].empty()) bound_.push_back(indices[i]);
    }
  }

  void set_floats(const std::vector<int64_t>& indices, const std::vector<double>& numbers) {
    TORCH_CHECK(indices.size() == numbers.size(), indices.size(), " values for ", numbers.size(), " numbers");
    for (size_t i = 0; i < indices.size(); ++i) {
      check(indices[i]);
      values_[indices[i]] = numbers[i];
    }
  }

  void resize(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    resized_ = true;
  }

  Tensor tensor(int64_t index) {
    check(index);
    settle();
    return values_[index].toTensor();
  }

  // Where it lies, for `lockstep_program_run`.
  int64_t address() { return reinterpret_cast<int64_t>(this); }

  // Whether all went well; if not, `fail` says what did not. seconds: takes those within the operator of every call.
  bool run(double* seconds) noexcept {
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      settle();
      for (size_t i = 0; i < calls_.size(); ++i) step(calls_[i], seconds ? seconds + i : nullptr);
      return true;
    } catch (...) {
      failure_ = std::current_exception();
      return false;
    }
  }

  // Throw what ended the last run.
  void fail() { std::rethrow_exception(std::exchange(failure_, nullptr)); }

 private:
  std::vector<IValue> values_;
  std::vector<Derived> derived_;  // bases before what is derived from them
  std::vector<std::vector<int64_t>> dependents_;  // of each value: what of `derived_` rests on it
  size_t settled_ = 0;           // so many of `derived_` are made
  std::vector<int64_t> growing_;  // what of them depends on the number of rows itself
  bool resized_ = false;
  std::vector<int64_t> bound_;  // values that were bound since, which something rests on
  std::vector<int64_t> stale_;  // what of `derived_` rests on them, and
  std::vector<char> is_stale_;  // whether it is there already
  std::vector<Derived> shapes_;
  std::vector<Recipe> recipes_;
  std::unordered_map<std::string, int64_t> shared_;  // constants of recipes, by their text
  std::vector<Step> calls_;
  std::vector<int64_t> arguments_;
  torch::jit::Stack stack_;
  c10::SmallVector<const IValue*, 16> given_;
  c10::DispatchKeySet backend_{c10::DispatchKey::CPU};
  bool on_cpu_ = true;
  std::exception_ptr failure_;
  int64_t rows_ = 1;

  int64_t add(IValue value) {
    if (value.isTensor() && value.toTensor().defined() && !value.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      backend_ = c10::DispatchKeySet(c10::legacyExtractDispatchKey(value.toTensor().key_set()));
      on_cpu_ = backend_.has(c10::DispatchKey::CPU);
    }
    values_.push_back(std::move(value));
    dependents_.emplace_back();
    return int64_t(values_.size()) - 1;
  }

  int64_t derive(Derived d) {
    for (const int64_t base : d.bases) {
      check(base);
      dependents_[base].push_back(int64_t(derived_.size()));
    }
    d.index = add(IValue());
    if (d.grows()) growing_.push_back(int64_t(derived_.size()));
    derived_.push_back(std::move(d));
    is_stale_.push_back(0);
    return derived_.back().index;
  }

  static Derived shaped(const std::string& type, int64_t base, const std::vector<int64_t>& shape) {
    TORCH_CHECK(shape.size() >= 2 && shape.size() % 4 == 2, "a view's shape is pairs of offset, sizes and strides");
    const int64_t dims = (int64_t(shape.size()) - 2) / 4;
    auto pair = [&](int64_t i) { return Affine{shape[2 * i], shape[2 * i + 1]}; };
    Derived d{Derived::VIEW, 0, {base}, type_named(type), pair(0), {}, {}};
    for (int64_t i = 0; i < dims; ++i) d.sizes.push_back(pair(1 + i));
    for (int64_t i = 0; i < dims; ++i) d.strides.push_back(pair(1 + dims + i));
    return d;
  }

  int64_t shared(const std::string& text) {
    const auto known = shared_.find(text);
    return known != shared_.end() ? known->second : shared_[text] = constant(text);
  }

  static c10::OperatorHandle found(const std::string& name) {
    const size_t dot = name.find('.');
    const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(), overload.c_str());
  }

  void add_call(const c10::OperatorHandle& op, const std::vector<int64_t>& arguments,
                const std::vector<int64_t>& results) {
    const auto& schema = op.schema();
    TORCH_CHECK(schema.arguments().size() == arguments.size(), schema.name(), " takes ", schema.arguments().size(),
                " arguments, got ", arguments.size());
    TORCH_CHECK(results.size() <= schema.returns().size(), schema.name(), " gives ", schema.returns().size(),
                " results");
    for (const int64_t result : results) check(result);
    const int64_t count = int64_t(arguments.size()), written = schema.is_mutable() ? int64_t(schema.returns().size()) : 0;
    const auto& overload = schema.overload_name();
    const Kernel kernel = kernel_named(overload.empty() ? schema.name() : schema.name() + "." + overload);
    calls_.push_back({op, kernel, int64_t(arguments_.size()), count, count - written, results});
    for (size_t i = 0; i < arguments.size(); ++i) {
      check(arguments[i]);
      arguments_.push_back(fitting(arguments[i], *schema.arguments()[i].type()));
    }
  }

  // Derive anew what rests on a value that was bound since, and what was not made yet. A step binds few of thousands of
  // values, so only what rests on those is looked at.
  void settle() {
    stale_.clear();
    if (resized_) gather(growing_);
    for (const int64_t value : bound_) gather(dependents_[value]);
    for (size_t i = 0; i < stale_.size(); ++i) gather(dependents_[derived_[stale_[i]].index]);
    for (const int64_t i : stale_) is_stale_[i] = 0;
    std::sort(stale_.begin(), stale_.end());  // bases first
    for (const int64_t i : stale_)
      if (size_t(i) < settled_) refresh(derived_[i]);
    for (size_t i = settled_; i < derived_.size(); ++i) refresh(derived_[i]);
    settled_ = derived_.size();
    bound_.clear();
    resized_ = false;
  }

  void gather(const std::vector<int64_t>& some) {
    for (const int64_t i : some)
      if (!is_stale_[i]) {
        is_stale_[i] = 1;
        stale_.push_back(i);
      }
  }

  void check(int64_t index) const {
    TORCH_CHECK(0 <= index && index < int64_t(values_.size()), "value ", index, " of ", values_.size());
  }

  void refresh(const Derived& d) {
    if (d.kind == Derived::NUMBER) {
      values_[d.index] = d.offset.at(rows_);
    } else if (d.kind == Derived::NUMBERS) {
      c10::List<int64_t> members;
      for (const Affine& member : d.sizes) members.push_back(member.at(rows_));
      values_[d.index] = std::move(members);
    } else if (d.kind == Derived::LIST) {
      c10::List<Tensor> members;
      for (const int64_t base : d.bases) members.push_back(values_[base].toTensor());
      values_[d.index] = std::move(members);
    } else {
      values_[d.index] = view_of(values_[d.bases[0]].toTensor(), d);
    }
  }

  Tensor view_of(const Tensor& base, const Derived& d) const {
    const int64_t size = int64_t(c10::elementSize(d.type));
    const int64_t bytes = base.storage_offset() * int64_t(base.element_size()) + d.offset.at(rows_);
    TORCH_CHECK(bytes % size == 0, "a view at byte ", bytes, " of a type of ", size, " bytes");
    c10::SmallVector<int64_t, 5> sizes, strides;
    int64_t last = 0, count = 1;
    for (size_t i = 0; i < d.sizes.size(); ++i) {
      sizes.push_back(d.sizes[i].at(rows_));
      strides.push_back(d.strides[i].at(rows_));
      last += (sizes.back() - 1) * strides.back();
      count *= sizes.back();
    }
    const int64_t end = bytes + (count ? (last + 1) * size : 0);
    TORCH_CHECK(end <= int64_t(base.storage().nbytes()), "a view of bytes ", bytes, " to ", end, " in memory of ",
                base.storage().nbytes(), ": too many rows (", rows_, ")");
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                           base.key_set(), c10::scalarTypeToTypeMeta(d.type));
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, bytes / size);
    return made;
  }

  // A whole number where the operator takes a float: the same value as a float.
  int64_t fitting(int64_t index, const c10::Type& type) {
    if (values_[index].isInt() && type.kind() == c10::TypeKind::FloatType)
      return add(IValue(double(values_[index].toInt())));
    return index;
  }

  // seconds: takes the time within the operator.
  void step(const Step& one, double* seconds = nullptr) {
    stack_.clear();
    try {
      const auto began = seconds ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point{};
      if (one.kernel && on_cpu_) {
        given_.clear();
        for (int64_t i = 0; i < one.count; ++i) given_.push_back(&values_[arguments_[one.first + i]]);
        one.kernel(given_.data(), size_t(one.inputs));
      } else {
        for (int64_t i = 0; i < one.count; ++i) stack_.push_back(values_[arguments_[one.first + i]]);
        one.op.redispatchBoxed(backend_, &stack_);
      }
      if (seconds) *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
      for (size_t i = 0; i < one.results.size(); ++i)
        values_[one.results[i]].toTensor().copy_(stack_[i].toTensor());
    } catch (c10::Error& error) {
      error.add_context(c10::str("in call ", &one - calls_.data(), " of a program: ", one.op.operator_name()));
      stack_.clear();
      throw;
    }
    stack_.clear();
  }
};

}  // namespace
}  // namespace lockstep

// Called past TorchScript, whose way from Python touches so much that it takes 100 us where a step of decoding has just
// driven it out of the caches.
extern "C" bool lockstep_program_run(void* program, double* seconds) {
  return static_cast<lockstep::Program*>(program)->run(seconds);
}

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  using lockstep::Program;
  m.class_<Program>("Program")
      .def(torch::init<>())
      .def("external", &Program::external)
      .def("constant", &Program::constant)
      .def("shape", &Program::shape)
      .def("view", &Program::view)
      .def("call", &Program::call)
      .def("recipe", &Program::recipe)
      .def("append", &Program::append)
      .def("bind", &Program::bind)
      .def("set_floats", &Program::set_floats)
      .def("resize", &Program::resize)
      .def("tensor", &Program::tensor)
      .def("address", &Program::address)
      .def("fail", &Program::fail);
}
