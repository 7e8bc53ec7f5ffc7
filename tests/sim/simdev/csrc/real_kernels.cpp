// A CUDA build of torch has real kernels for CUDA tensors. They need a driver, and here they step aside.
#ifdef SIMDEV_CUDA
#include <ATen/core/dispatch/Dispatcher.h>

#include "backend.h"

namespace simdev {

namespace {

// A device type that nobody uses and that has no kernels. What torch calls for it, it also calls for CUDA where it was
// built without: a composition of other operators if there is one, else the fallback.
TORCH_LIBRARY_IMPL(_, PrivateUse3, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

void as_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3), stack);
}

struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The registrations last as long as the handles. Torch warns once that kernels are replaced: they are meant to be.
std::vector<c10::RegistrationHandleRAII> set_aside() {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::RegistrationHandleRAII> handles;
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    handles.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                              c10::KernelFunction::makeFromBoxedFunction<&as_without_cuda>(),
                                              std::nullopt, nullptr, "simulated CUDA"));
  }
  return handles;
}

auto* const kSetAside = new std::vector<c10::RegistrationHandleRAII>(set_aside());

}  // namespace

}  // namespace simdev
#endif
