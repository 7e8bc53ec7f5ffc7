// Device tensors <-> CPU tensors over the same bytes.
#include <cstring>

#include "backend.h"

namespace simdev {

namespace {

void copy_metadata(const at::Tensor& from, const at::Tensor& to) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
}

// A view of a normal tensor made in inference mode must be a normal tensor too: hence the base's own keys.
at::Tensor view_over(c10::Storage storage, const at::Tensor& base, const at::Tensor& like) {
  auto keys = base.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype());
  copy_metadata(like, t);
  return t;
}

c10::Storage storage_over(size_t bytes, at::DataPtr data, c10::Allocator* allocator) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(bytes),
                                                            std::move(data), allocator, true));
}

}  // namespace

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_metadata(like, t);
  return t;
}

bool is_ours(const at::Tensor& t) {
  return t.defined() && t.device().type() == kType;
}

int device_number(const at::Tensor& t) {
  return is_ours(t) ? t.device().index() : kHost;
}

std::shared_ptr<Block> block_of(const at::Tensor& t) {
  return is_ours(t) ? find_block(t.storage().data()) : nullptr;
}

std::pair<size_t, size_t> byte_range(const at::Tensor& t) {
  size_t lo = t.storage_offset() * t.element_size(), hi = lo + t.element_size();
  for (int64_t i = 0; i < t.dim(); i++) hi += (t.size(i) - 1) * t.stride(i) * t.element_size();
  return {lo, hi};
}

void note_access(const at::Tensor& t, bool write, StreamId id, uint64_t clock, const std::string& op) {
  if (!is_ours(t) || !t.numel()) return;
  auto block = block_of(t);
  if (!block) return;
  auto [lo, hi] = byte_range(t);
  touch(*block, lo, hi, write, id, clock, op);
}

at::Tensor Aliases::to_cpu(const at::Tensor& t) {
  if (!is_ours(t)) return t;
  auto* storage = t.storage().unsafeGetStorageImpl();
  auto it = to_cpu_.find(storage);
  if (it == to_cpu_.end()) {
    void* data = storage->mutable_data();
    at::DataPtr pointer(data, c10::Device(c10::kCPU));
    if (hold_blocks_) {
      auto* block = new std::shared_ptr<Block>(block_of(t));
      auto drop = [](void* p) { delete static_cast<std::shared_ptr<Block>*>(p); };
      pointer = at::DataPtr(data, block, drop, c10::Device(c10::kCPU));
    }
    auto alias = storage_over(storage->nbytes(), std::move(pointer), c10::GetAllocator(c10::kCPU));
    to_device_.emplace(alias.unsafeGetStorageImpl(), t.storage());
    it = to_cpu_.emplace(storage, alias).first;
  }
  auto alias = tensor_over(it->second, c10::DispatchKey::CPU, t);
  pairs_.emplace_back(alias, t);
  return alias;
}

at::Tensor Aliases::to_device(const at::Tensor& t, int device) {
  if (!t.defined() || !t.device().is_cpu()) return t;
  for (auto& [alias, original] : pairs_)
    if (alias.is_same(t)) return original;
  auto it = to_device_.find(t.storage().unsafeGetStorageImpl());
  if (it == to_device_.end()) return tensor_over(adopt(t.storage(), device), kKey, t);
  auto* storage = it->second.unsafeGetStorageImpl();
  for (auto& [alias, original] : pairs_)
    if (original.storage().unsafeGetStorageImpl() == storage) return view_over(it->second, original, t);
  return tensor_over(it->second, kKey, t);  // a second result in memory adopted for the first
}

c10::Storage Aliases::adopt(const c10::Storage& storage, int device) {
  auto bytes = storage.nbytes();
  c10::DeviceGuard guard(c10::Device(kType, device));
  at::DataPtr data = device_allocator().allocate(0);
  if (bytes) {
    Lock lock;
    take_or_raise(device, bytes);
    auto memory = std::make_shared<c10::Storage>(storage);
    data = own_block(add_block(storage.mutable_data(), bytes, device, current_stream(device), memory));
  }
  auto adopted = storage_over(bytes, std::move(data), &device_allocator());
  to_device_.emplace(storage.unsafeGetStorageImpl(), adopted);
  return adopted;
}

void Aliases::write_back() {
  for (auto& [alias, original] : pairs_) {
    auto* cpu = alias.storage().unsafeGetStorageImpl();
    auto it = to_device_.find(cpu);
    if (it == to_device_.end()) continue;
    auto* ours = it->second.unsafeGetStorageImpl();
    auto* impl = original.unsafeGetTensorImpl();
    if (original.storage().unsafeGetStorageImpl() != ours) impl->set_storage_keep_dtype(it->second);
    if (cpu->nbytes() != ours->nbytes() || cpu->data() != ours->data()) {
      c10::DeviceGuard guard(ours->device());
      auto data = device_allocator().allocate(cpu->nbytes());
      if (cpu->nbytes()) std::memcpy(data.get(), cpu->data(), cpu->nbytes());
      ours->set_data_ptr_noswap(std::move(data));
      ours->set_nbytes(cpu->nbytes());
    }
    bool same_shape = alias.sizes().equals(original.sizes()) && alias.strides().equals(original.strides());
    if (!same_shape || alias.storage_offset() != original.storage_offset())
      impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
}

}  // namespace simdev
