// The kernels as PyTorch operators `lockstep::*`, whose schemas are in `ops/raw/`.
//
// A binding checks shapes and types and passes pointers. All are compiled here, as one: PyTorch's headers take longer
// than everything else together.
#include "bindings_attention.h"
#include "bindings_fused.h"
#include "bindings_int8.h"
#include "bindings_latent.h"
#include "bindings_linear.h"
#include "bindings_moe.h"
#include "bindings_norm.h"
#include "bindings_optimizer.h"
#include "bindings_rows.h"
#include "bindings_vocabulary.h"

namespace lockstep {
namespace {

// Filled once, when the library is loaded.
std::unordered_map<std::string, Kernel>& kernels() {
  static std::unordered_map<std::string, Kernel> all;
  return all;
}

}  // namespace

void add_kernel(const std::string& name, Kernel kernel) { kernels()[name] = kernel; }

Kernel kernel_named(const std::string& name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : found->second;
}

}  // namespace lockstep

std::vector<const char*>& lockstep::without_results() {
  static std::vector<const char*> all;
  return all;
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  lockstep::register_linear(m);
  lockstep::register_attention(m);
  lockstep::register_int8(m);
  lockstep::register_latent(m);
  lockstep::register_moe(m);
  lockstep::register_norm(m);
  lockstep::register_rows(m);
  lockstep::register_fused(m);
  lockstep::register_vocabulary(m);
  lockstep::register_optimizer(m);
}

TORCH_LIBRARY_IMPL(lockstep, Negative, m) {
  for (const char* name : lockstep::without_results())
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&lockstep::without_negatives>());
}
