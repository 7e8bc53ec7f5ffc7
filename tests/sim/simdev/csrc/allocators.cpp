// Memory as torch sees it: the device allocator, the pinned allocator, resizing.
#include <cstdlib>
#include <cstring>

#include "backend.h"

namespace simdev {

namespace {

std::shared_ptr<void> host_memory(size_t bytes) {
  void* p = nullptr;
  TORCH_CHECK(posix_memalign(&p, 512, rounded(bytes)) == 0, "the host is out of memory");
  return {p, &std::free};
}

void delete_block(void* context) {
  Lock lock;
  auto* owner = static_cast<std::shared_ptr<Block>*>(context);
  free_block(*owner);
  delete owner;
}

}  // namespace

void take_or_raise(int device, size_t bytes) {
  if (take(device, bytes)) return;
  auto& m = world().memory[device];
  TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory on simulated device ", device, ". Tried to allocate ", bytes,
                   " bytes. The device has a total capacity of ", m.capacity, " bytes of which ",
                   m.capacity - std::min(m.capacity, m.used + m.foreign), " bytes is free; ", m.used,
                   " bytes is allocated by torch and ", m.foreign, " bytes by other processes.");
}

at::DataPtr own_block(const std::shared_ptr<Block>& block) {
  return {block->data, new std::shared_ptr<Block>(block), &delete_block, c10::Device(kType, block->device)};
}

namespace {

class Allocator final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    if (!bytes) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kType, device)};
    Lock lock;
    take_or_raise(device, bytes);
    auto memory = host_memory(bytes);
    std::memset(memory.get(), 0xFF, bytes);  // reads of memory that nobody wrote give NaN
    return own_block(add_block(memory.get(), bytes, device, current_stream(device), memory));
  }
  void copy_data(void* dst, const void* src, size_t bytes) const override { std::memcpy(dst, src, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Lock lock;
    empty_cache();
  }
  void recordStream(const at::DataPtr& data, c10::Stream s) override {
    Lock lock;
    if (auto block = find_block(data.get())) block->recorded.insert(s.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& m = world().memory[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* s : {&stats.allocated_bytes[0], &stats.active_bytes[0], &stats.requested_bytes[0]}) {
      s->current = m.used;
      s->peak = m.peak;
    }
    stats.reserved_bytes[0].current = m.reserved;
    stats.reserved_bytes[0].peak = m.peak_reserved;
    stats.allocation[0].allocated = m.allocations;
    stats.allocation[0].freed = m.frees;
    stats.allocation[0].current = m.allocations - m.frees;
    stats.num_ooms = m.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock;
    world().memory[device].ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& m = world().memory[device];
    m.peak = m.used;
    m.peak_reserved = m.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock;
    return {free_bytes(device), world().memory[device].capacity};
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    Lock lock;
    auto* memory = new std::shared_ptr<void>(host_memory(bytes));
    pin(memory->get(), bytes);
    return {memory->get(), memory, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* dst, const void* src, size_t bytes) const override { std::memcpy(dst, src, bytes); }

 private:
  static void release(void* context) {
    Lock lock;
    auto* memory = static_cast<std::shared_ptr<void>*>(context);
    unpin(memory->get());
    delete memory;
  }
};

}  // namespace

c10::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard guard(storage->device());
  auto data = device_allocator().allocate(bytes);
  if (bytes && storage->nbytes()) std::memcpy(data.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

}  // namespace simdev
