// What Python sees: thin functions over the world; names and units are explained in world.py.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace simdev {

namespace py = pybind11;

namespace {

void bind_devices(py::module_& m) {
  m.def("install_hooks", &install_hooks);
  m.def("set_device_count", [](int n) {
    TORCH_CHECK(n > 0 && n <= kMaxDevices, "from 1 to ", kMaxDevices, " devices can be simulated, not ", n);
    world().device_count = n;
  });
  m.def("device_count", [] { return world().device_count; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("exchange_device", [](int device) {
    int old = current_device();
    if (device >= 0 && device != old) set_current_device(device);
    return old;
  });
  m.def("restore_device", &restore_current_device);
  m.def("has_context", [](int device) {
    Lock lock;
    return world().memory[device].context;
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("storage_resize", [](c10::Storage s, size_t bytes) { resize_storage(s.unsafeGetStorageImpl(), bytes); });
  m.def("synchronize", [](int device) {
    py::gil_scoped_release no_gil;
    Lock lock;
    world().memory[device].context = true;
    sync_device(device);
  });
}

void bind_memory(py::module_& m) {
  m.def("set_capacity", [](int d, size_t bytes) {
    Lock lock;
    world().memory[d].capacity = bytes;
  });
  m.def("set_foreign", [](int d, size_t bytes) {
    Lock lock;
    world().memory[d].foreign = bytes;
  });
  m.def("free_bytes", [](int d) {
    Lock lock;
    return free_bytes(d);
  });
  m.def("empty_cache", [] {
    Lock lock;
    empty_cache();
  });
  m.def("reset_peak", [](int d) { device_allocator().resetPeakStats(d); });
  m.def("memory", [](int device) {
    Lock lock;
    auto& s = world().memory[device];
    return std::map<std::string, size_t>{{"capacity", s.capacity},
                                         {"allocated", s.used},
                                         {"reserved", s.reserved},
                                         {"peak", s.peak},
                                         {"peak_reserved", s.peak_reserved},
                                         {"foreign", s.foreign},
                                         {"allocations", s.allocations},
                                         {"frees", s.frees},
                                         {"ooms", s.ooms}};
  });
  m.def("register_host", [](uintptr_t p, size_t bytes) {
    Lock lock;
    return register_host(reinterpret_cast<void*>(p), bytes);
  });
  m.def("unregister_host", [](uintptr_t p) {
    Lock lock;
    return unregister_host(reinterpret_cast<void*>(p));
  });
  m.def("leave_error", [](int error) { left_error = error; });
  m.def("pinned_bytes", [] {
    Lock lock;
    return pinned_bytes();
  });
}

void bind_links(py::module_& m) {
  m.def("links", [] {
    Lock lock;
    std::map<Link, std::pair<uint64_t, uint64_t>> result;
    for (auto& [link, state] : world().links) result[link] = {state.bytes, state.copies};
    return result;
  });
  m.def("copy_log", [] {
    Lock lock;
    std::vector<std::tuple<int, int, uint64_t, StreamId, bool>> result;
    for (auto& c : world().copy_log) result.emplace_back(c.from, c.to, c.bytes, c.stream, c.non_blocking);
    return result;
  });
  m.def("set_peer", [](int from, int to, bool allowed) {
    Lock lock;
    world().links[{from, to}].peer = allowed;
  });
  m.def("peer", [](int from, int to) {
    Lock lock;
    return from != to && world().links[{from, to}].peer;
  });
  m.def("set_bandwidth", [](int from, int to, double bandwidth, double pageable) {
    Lock lock;
    auto& link = world().links[{from, to}];
    link.bandwidth = bandwidth;
    link.pageable_bandwidth = pageable;
  });
  m.def("set_compute_rate", [](int device, double flops, double bytes, double per_op) {
    Lock lock;
    auto& rate = world().compute[device];
    rate.flops = flops;
    rate.bytes = bytes;
    rate.per_op = per_op;
  });
  m.def("host_time", [] {
    Lock lock;
    return world().host_time;
  });
  m.def("op_counts", [] {
    Lock lock;
    return world().op_counts;
  });
}

void bind_races(py::module_& m) {
  py::class_<Race>(m, "Race")
      .def_readonly("kind", &Race::kind)
      .def_readonly("op", &Race::op)
      .def_readonly("other_op", &Race::other_op)
      .def_readonly("device", &Race::device)
      .def_readonly("lo", &Race::lo)
      .def_readonly("hi", &Race::hi)
      .def_readonly("stream", &Race::stream)
      .def_readonly("other_stream", &Race::other_stream)
      .def_readonly("message", &Race::message)
      .def("__repr__", [](const Race& r) { return "Race(" + r.message + ")"; })
      .def("__str__", [](const Race& r) { return r.message; });
  m.def("races", [] {
    Lock lock;
    return world().races;
  });
  m.def("clear_races", [] {
    Lock lock;
    world().races.clear();
  });
  m.def("set_track", [](bool on) {
    Lock lock;
    world().track = on;
  });
  m.def("set_strict", [](bool on) {
    Lock lock;
    world().strict = on;
  });
  m.def("set_late", [](bool on) {
    Lock lock;
    world().late = on;
  });
  m.def("reset", [] {
    Lock lock;
    reset();
  });
}

}  // namespace

void bind(py::module_& m) {
  bind_devices(m);
  bind_memory(m);
  bind_links(m);
  bind_races(m);
}

}  // namespace simdev

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  simdev::bind(m);
}
