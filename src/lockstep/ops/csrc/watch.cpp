// Notices when some of many tensors were written in place or have other memory: one call, which looks at what it must
// and at nothing else. A step of decoding asks this of every weight, and has just driven all of them out of the caches.
#include <torch/custom_class.h>
#include <torch/library.h>

namespace lockstep {
namespace {

struct Watch : torch::CustomClassHolder {
  explicit Watch(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const auto& tensor : tensors_) seen_.push_back(now(tensor));
  }

  int64_t address() { return reinterpret_cast<int64_t>(this); }

  // Whether every tensor has the version and the memory that it had.
  bool same() const {
    bool found = true;  // no early end: the loads of all tensors are under way at once
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const State state = now(tensors_[i]);
      found &= state.version == seen_[i].version & state.memory == seen_[i].memory;
    }
    return found;
  }

 private:
  struct State {
    uint32_t version;
    const void* memory;
  };
  static State now(const at::Tensor& tensor) {
    const auto* held = tensor.unsafeGetTensorImpl();
    return {held->version_counter().current_version(), held->unsafe_storage().unsafeGetStorageImpl()->data()};
  }

  std::vector<at::Tensor> tensors_;
  std::vector<State> seen_;
};

}  // namespace
}  // namespace lockstep

extern "C" bool lockstep_watch_same(const void* watch) { return static_cast<const lockstep::Watch*>(watch)->same(); }

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  using lockstep::Watch;
  m.class_<Watch>("Watch").def(torch::init<std::vector<at::Tensor>>()).def("address", &Watch::address);
}
