// What the torch-facing files share. SIMDEV_CUDA, SIMDEV_XPU or SIMDEV_MPS chooses which of torch's device types is
// simulated; without them it is PrivateUse1, which Python renames (npu).
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <torch/library.h>

#include "world.h"

namespace simdev {

#if defined(SIMDEV_CUDA)
#define SIMDEV_TYPE CUDA
#elif defined(SIMDEV_XPU)
#define SIMDEV_TYPE XPU
#elif defined(SIMDEV_MPS)
#define SIMDEV_TYPE MPS
#else
#define SIMDEV_TYPE PrivateUse1
#endif

// The macros of torch take the name of the type, so ours must be expanded first.
#define SIMDEV_EXPANDED(macro, ...) macro(__VA_ARGS__)
#define SIMDEV_LIBRARY(space, name) SIMDEV_EXPANDED(TORCH_LIBRARY_IMPL, space, SIMDEV_TYPE, name)

constexpr auto kKey = c10::DispatchKey::SIMDEV_TYPE;
constexpr auto kType = c10::DeviceType::SIMDEV_TYPE;

// device.cpp
int current_device();
void set_current_device(int device);  // raises for a device that does not exist; makes a context on it
void restore_current_device(int device);  // makes none
int device_index(std::optional<c10::Device> device);
StreamId current_stream(int device);
at::Generator cpu_generator(const at::Generator& generator);  // the generator inside a simulated one
const at::Generator& default_generator(int device);
void install_hooks();

// allocators.cpp
c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();
void take_or_raise(int device, size_t bytes);
at::DataPtr own_block(const std::shared_ptr<Block>& block);
void resize_storage(c10::StorageImpl* storage, size_t bytes);

// alias.cpp
bool is_ours(const at::Tensor& t);
at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);  // shape and type of `like`
int device_number(const at::Tensor& t);                                                      // kHost for a CPU tensor
std::pair<size_t, size_t> byte_range(const at::Tensor& t);  // from the first to behind the last byte, in its storage
std::shared_ptr<Block> block_of(const at::Tensor& t);
void note_access(const at::Tensor& t, bool write, StreamId id, uint64_t clock, const std::string& op);

// CPU tensors that stand in for device tensors: same bytes, same shape. All memory is host memory, so nothing is
// copied.
class Aliases {
 public:
  // With hold_blocks an alias keeps the device memory alive (for queued copies), but not the tensor or its storage: a
  // tensor that is freed too early must still be seen as freed.
  explicit Aliases(bool hold_blocks = false) : hold_blocks_(hold_blocks) {}
  at::Tensor to_cpu(const at::Tensor& t);
  // The device tensor for a CPU result: the original of an alias, a view of it, or new device memory adopted from the
  // CPU (accounted, not copied).
  at::Tensor to_device(const at::Tensor& t, int device);
  // Carries resized or re-pointed out= and in-place arguments over to the originals.
  void write_back();

 private:
  c10::Storage adopt(const c10::Storage& storage, int device);
  bool hold_blocks_;
  std::map<c10::StorageImpl*, c10::Storage> to_cpu_, to_device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // (alias, original)
};

// fallback.cpp
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace simdev
