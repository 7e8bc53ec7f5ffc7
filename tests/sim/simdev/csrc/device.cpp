// The device as torch sees it: the guard (current device, streams, events), generators and hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "backend.h"

namespace simdev {

namespace {

thread_local int tls_device = 0;
thread_local std::array<StreamId, kMaxDevices> tls_stream = [] {
  std::array<StreamId, kMaxDevices> ids{};
  for (int d = 0; d < kMaxDevices; d++) ids[d] = d;
  return ids;
}();

void check_index(int device) {
  TORCH_CHECK(device >= 0 && device < world().device_count, "invalid device ordinal ", device, ": there are ",
              world().device_count, " simulated devices");
}

}  // namespace

int current_device() {
  return tls_device;
}

void set_current_device(int device) {
  check_index(device);
  Lock lock;
  world().memory[device].context = true;
  tls_device = device;
}

void restore_current_device(int device) {
  check_index(device);
  tls_device = device;
}

int device_index(std::optional<c10::Device> device) {
  int index = device && device->index() >= 0 ? device->index() : tls_device;
  check_index(index);
  return index;
}

StreamId current_stream(int device) {
  return tls_stream[device];
}

// ---------------------------------------------------------------- guard
namespace {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  using Device = c10::Device;
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    if (d.index() >= 0 && d.index() != tls_device) set_current_device(d.index());
    return old;
  }
  Device getDevice() const override { return Device(kType, tls_device); }
  void setDevice(Device d) const override { set_current_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) tls_device = d.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return world().device_count; }

  c10::Stream getStream(Device d) const override { return handle(device_index(d), tls_stream[device_index(d)]); }
  c10::Stream getDefaultStream(Device d) const override { return handle(device_index(d), device_index(d)); }
  c10::Stream getNewStream(Device d, int priority = 0) const override {
    Lock lock;
    int device = device_index(d);
    world().memory[device].context = true;
    return handle(device, stream_from_pool(device, priority));
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool high_priority = false) const override {
    return getNewStream(d, high_priority ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    tls_stream[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id() + 1); }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock;
    return query_stream(s.id());
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Lock lock;
    sync_stream(s.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock;
    int index = device < 0 ? tls_device : device;
    world().memory[index].context = true;
    sync_device(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    device_allocator().recordStream(data, s);
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    auto recorded = record_event(s.id());
    if (*event)
      *static_cast<EventPtr*>(*event) = recorded;
    else
      *event = new EventPtr(recorded);
  }
  void block(void* event, const c10::Stream& s) const override {
    Lock lock;
    if (event) wait_event(s.id(), *static_cast<EventPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    return !event || query_event(*static_cast<EventPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    if (event) sync_event(*static_cast<EventPtr*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    Lock lock;
    delete static_cast<EventPtr*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    Lock lock;
    return ((*static_cast<EventPtr*>(second))->time - (*static_cast<EventPtr*>(first))->time) * 1e3;
  }

 private:
  static c10::Stream handle(int device, StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(kType, device), id);
  }
};

SIMDEV_EXPANDED(C10_REGISTER_GUARD_IMPL, SIMDEV_TYPE, Guard)

// ---------------------------------------------------------------- random numbers: a CPU generator per device
class Generator final : public c10::GeneratorImpl {
 public:
  Generator(int device, at::Generator cpu)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(kKey)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a simulated generator has no offset"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), cpu.clone()); }

  at::Generator cpu;
};

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? tls_device : device, at::detail::createCPUGenerator());
}

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int d = 0; d < kMaxDevices; d++) all->push_back(new_generator(d));
    return all;
  }();
  return (*generators)[device < 0 ? tls_device : device];
}

at::Generator cpu_generator(const at::Generator& generator) {
  auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  return ours ? ours->cpu : generator;
}

// ---------------------------------------------------------------- hooks
namespace {

template <class Base>
class HooksBase : public Base {
 public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return world().device_count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return world().device_count; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return tls_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice(c10::Device(kType, d)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(tls_device, d < 0 ? tls_device : d));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return new_generator(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* p) const override {
    Lock lock;
    return find_pinned(p) != nullptr;
  }
  at::Device getDeviceFromPtr(void* p) const override {
    Lock lock;
    auto block = find_block(p);
    TORCH_CHECK(block, "the pointer is not in the memory of a simulated device");
    return c10::Device(kType, block->device);
  }
};

// torch makes its hooks objects for its own device types while it is imported, or when they are first asked for, and
// offers no way to replace them. Their classes have no data members, in CPU and CUDA builds, and neither have ours, which
// are constructed in their place: that changes the virtual functions and nothing else.
template <class Ours, class Torchs>
void replace(const Torchs& hooks) {
  static_assert(sizeof(Ours) == sizeof(Torchs));
  new (const_cast<Torchs*>(&hooks)) Ours();
}

#if defined(SIMDEV_CUDA)
class Hooks final : public HooksBase<at::CUDAHooksInterface> {
 public:
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return world().device_count; }
  c10::DeviceIndex current_device() const override { return tls_device; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  void deviceSynchronize(c10::DeviceIndex d) const override { Guard().synchronizeDevice(d); }
};
#elif defined(SIMDEV_XPU)
class Hooks final : public HooksBase<at::XPUHooksInterface> {
 public:
  bool hasXPU() const override { return true; }
  c10::DeviceIndex getNumGPUs() const override { return world().device_count; }
  c10::DeviceIndex current_device() const override { return tls_device; }
  void deviceSynchronize(c10::DeviceIndex d) const override { Guard().synchronizeDevice(d); }
};
#elif defined(SIMDEV_MPS)
class Hooks final : public HooksBase<at::MPSHooksInterface> {
 public:
  bool hasMPS() const override { return true; }
  bool isOnMacOSorNewer(unsigned, unsigned) const override { return true; }
  at::Allocator* getMPSDeviceAllocator() const override { return &device_allocator(); }
  void deviceSynchronize() const override { Guard().synchronizeDevice(0); }
};
#else
class Hooks final : public HooksBase<at::PrivateUse1HooksInterface> {
 public:
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
#endif

}  // namespace

void install_hooks() {
  c10::SetAllocator(kType, &device_allocator(), 1);
#if defined(SIMDEV_CUDA)
  replace<Hooks>(at::detail::getCUDAHooks());
#elif defined(SIMDEV_XPU) || defined(SIMDEV_MPS)
  replace<at::CUDAHooksInterface>(at::detail::getCUDAHooks());  // torch refuses two kinds: no CUDA, also in its builds
#ifdef SIMDEV_XPU
  replace<Hooks>(at::detail::getXPUHooks());
#else
  replace<Hooks>(at::detail::getMPSHooks());
#endif
#else
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#endif
}

}  // namespace simdev
