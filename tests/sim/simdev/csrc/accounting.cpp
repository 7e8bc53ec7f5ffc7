// Memory: what each device holds, what is pinned on the host, what crossed which link.
#include <cstring>
#include <mutex>

#include "world.h"

namespace simdev {

namespace {

// Never destroyed: tensors may be freed while the interpreter shuts down.
std::recursive_mutex& mutex() {
  static auto* m = new std::recursive_mutex;
  return *m;
}

int lock_depth = 0;

}  // namespace

std::vector<Task>& finished_tasks() {
  static auto* tasks = new std::vector<Task>;
  return *tasks;
}

Lock::Lock() {
  mutex().lock();
  ++lock_depth;
}

Lock::~Lock() {
  std::vector<Task> drop;
  if (lock_depth == 1) drop.swap(finished_tasks());
  --lock_depth;
  mutex().unlock();
}

World& world() {
  static auto* w = new World;
  return *w;
}

size_t rounded(size_t bytes) {
  return (bytes + 511) / 512 * 512;
}

bool take(int device, size_t bytes) {
  auto& m = world().memory[device];
  size_t n = rounded(bytes);
  if (m.used + n + m.foreign > m.capacity) {
    m.ooms++;
    return false;
  }
  m.context = true;
  m.used += n;
  m.allocations++;
  m.reserved = std::max(m.reserved, m.used);
  m.peak = std::max(m.peak, m.used);
  m.peak_reserved = std::max(m.peak_reserved, m.reserved);
  return true;
}

void give_back(int device, size_t bytes) {
  auto& m = world().memory[device];
  m.used -= rounded(bytes);
  m.frees++;
}

size_t free_bytes(int device) {
  auto& m = world().memory[device];
  m.context = true;
  size_t taken = m.foreign + m.reserved;
  return taken < m.capacity ? m.capacity - taken : 0;
}

void empty_cache() {
  for (auto& m : world().memory) m.reserved = m.used;
}

std::shared_ptr<Block> add_block(void* data, size_t bytes, int device, StreamId id, std::shared_ptr<void> memory) {
  auto block = std::make_shared<Block>();
  block->data = data;
  block->bytes = bytes;
  block->device = device;
  block->stream = id;
  block->memory = std::move(memory);
  world().blocks[static_cast<char*>(data)] = block;
  return block;
}

std::shared_ptr<Block> find_block(const void* data) {
  auto& blocks = world().blocks;
  auto* p = static_cast<const char*>(data);
  auto it = blocks.upper_bound(const_cast<char*>(p));
  if (it == blocks.begin()) return nullptr;
  auto block = (--it)->second.lock();
  return block && p < static_cast<char*>(block->data) + block->bytes ? block : nullptr;
}

void free_block(const std::shared_ptr<Block>& block) {
  give_back(block->device, block->bytes);
  world().blocks.erase(static_cast<char*>(block->data));
  check_free(*block);
  // The allocator may hand the memory out again at once, except to copies that it was told about (record_stream) or
  // that are ordered before any reuse (the stream of the allocation). Garbage makes every other late reader visible.
  bool in_use = false, safe = true;
  for (auto& [id, count] : block->pending) {
    if (count == 0) continue;
    in_use = true;
    safe &= id == block->stream || block->recorded.count(id);
  }
  if (!in_use || !safe) std::memset(block->data, 0xFF, block->bytes);
}

PinnedRange* find_pinned(const void* data) {
  auto& pinned = world().pinned;
  auto* p = const_cast<char*>(static_cast<const char*>(data));
  auto it = pinned.upper_bound(p);
  if (it == pinned.begin()) return nullptr;
  --it;
  return p < it->first + it->second.bytes ? &it->second : nullptr;
}

// torch's pinned allocator rounds up to powers of two, and so do we.
void pin(void* data, size_t bytes) {
  size_t locked = 512;
  while (locked < bytes) locked *= 2;
  world().pinned[static_cast<char*>(data)] = {bytes, locked, false, {}};
}

void unpin(void* data) {
  world().pinned.erase(static_cast<char*>(data));
}

int register_host(void* data, size_t bytes) {
  constexpr int kInvalidValue = 1, kAlreadyRegistered = 712;
  if (!data || !bytes) return kInvalidValue;
  auto* p = static_cast<char*>(data);
  auto next = world().pinned.lower_bound(p);
  if (find_pinned(data) || (next != world().pinned.end() && next->first < p + bytes)) return kAlreadyRegistered;
  world().pinned[p] = {bytes, bytes, true, {}};
  return 0;
}

int unregister_host(void* data) {
  constexpr int kNotRegistered = 713;
  auto it = world().pinned.find(static_cast<char*>(data));
  if (it == world().pinned.end() || !it->second.registered) return kNotRegistered;
  auto range = it->second;
  world().pinned.erase(it);
  if (!range.uses.empty()) {
    report({.kind = "unregistered",
            .op = "cudaHostUnregister",
            .other_op = "copy",
            .device = kHost,
            .lo = 0,
            .hi = range.bytes,
            .message = "cudaHostUnregister of " + std::to_string(range.bytes) + " bytes while " +
                       std::to_string(range.uses.size()) + " queued copies still use them"});
  }
  return 0;
}

size_t pinned_bytes() {
  size_t total = 0;
  for (auto& [p, range] : world().pinned) total += range.locked;
  return total;
}

void count_copy(const CopyRecord& record) {
  auto& link = world().links[{record.from, record.to}];
  link.bytes += record.bytes;
  link.copies++;
  world().copy_log.push_back(record);
}

// Counters, peaks, limits, rates and flags as at start; memory in use and pinned memory stay. Runs what is queued
// first, so that nothing from before can be late afterwards.
void reset() {
  auto& w = world();
  for (int d = 0; d < w.device_count; d++) sync_device(d);
  for (int d = 0; d < kMaxDevices; d++) {
    auto& m = w.memory[d];
    m = Memory{.used = m.used, .reserved = m.used, .peak = m.used, .peak_reserved = m.used, .context = m.used > 0};
    w.compute[d] = ComputeRate{};
  }
  w.links.clear();
  w.copy_log.clear();
  w.races.clear();
  w.op_counts.clear();
  w.host_time = 0;
  for (auto& [id, s] : w.streams) s.time = 0;
  w.track = w.late = true;
  w.strict = false;
}

}  // namespace simdev
