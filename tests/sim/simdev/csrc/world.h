// The state of the simulated machine. Plain C++: nothing in world.h, accounting.cpp, streams.cpp, clock.cpp or
// tracker.cpp knows about torch. Every function here expects the caller to hold a Lock.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simdev {

constexpr int kMaxDevices = 16;
constexpr int kHost = -1;  // the host's number in a link
constexpr int kPoolStreams = 32, kPriorities = 4;

using StreamId = int64_t;  // the default stream of device i has id i
using VectorClock = std::map<StreamId, uint64_t>;
using Task = std::function<void()>;
using Link = std::pair<int, int>;  // (from, to); kHost stands for the host

// Holds the one mutex of the simulation. Finished tasks may own Python objects, and dropping those needs the GIL, so
// they are kept until the outermost Lock has let go of the mutex: a thread that holds the mutex never waits for the
// GIL.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

struct Access {
  size_t lo, hi;  // byte range inside the block
  bool write;
  StreamId stream;
  uint64_t clock;
  std::string op;
};

// One allocation on one device.
struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  int device = 0;
  StreamId stream = 0;              // the stream it was allocated on
  std::set<StreamId> recorded;      // record_stream was called for these
  std::map<StreamId, int> pending;  // copies queued but not run, per stream
  std::vector<Access> accesses;
  std::shared_ptr<void> memory;  // frees `data` when the last user lets go
};

struct Event {
  StreamId stream = 0;
  bool done = false;
  VectorClock seen;
  double time = 0;
};
using EventPtr = std::shared_ptr<Event>;

struct Stream {
  int device = 0;
  std::deque<Task> tasks;  // run only when somebody waits for them
  VectorClock seen;        // what is known to have happened before the next operation
  double time = 0;         // virtual seconds at which everything issued so far has finished
};

struct Memory {
  size_t capacity = size_t(16) << 30, used = 0, reserved = 0, peak = 0, peak_reserved = 0;
  size_t foreign = 0;  // taken by other processes
  size_t allocations = 0, frees = 0, ooms = 0;
  bool context = false;  // whether this process has one there
};

// A queued copy's use of pinned host memory.
struct HostUse {
  char *lo, *hi;
  bool incoming;  // the device writes here
};

struct PinnedRange {
  size_t bytes = 0, locked = 0;  // asked for; really page-locked
  bool registered = false;       // by cudaHostRegister, as opposed to torch's pinned allocator
  std::vector<HostUse> uses;     // copies that have not run yet
};

// Something that serves one request at a time in virtual time: a link or a device's compute units.
class Engine {
 public:
  // Takes the first gap of `seconds` that starts at `ready` or later; returns the end of it.
  double reserve(double ready, double seconds);

 private:
  std::map<double, double> busy_;  // start -> end, disjoint
};

struct LinkState {
  uint64_t bytes = 0, copies = 0;
  double bandwidth = 0, pageable_bandwidth = 0;  // bytes per second; 0: takes no time
  bool peer = true;
  Engine engine;
};

struct ComputeRate {
  double flops = 0, bytes = 0, per_op = 0;  // per second, per second, seconds; 0: takes no time
  Engine engine;
};

struct CopyRecord {
  int from, to;
  uint64_t bytes;
  StreamId stream;
  bool non_blocking;
};

struct Race {
  std::string kind, op, other_op;
  int device = 0;
  size_t lo = 0, hi = 0;
  StreamId stream = 0, other_stream = 0;
  std::string message;
};

struct World {
  int device_count = 0;
  Memory memory[kMaxDevices];
  ComputeRate compute[kMaxDevices];
  std::map<Link, LinkState> links;
  std::map<StreamId, Stream> streams;
  std::map<std::pair<int, int>, int> pool_next;  // (device, priority) -> next stream of the pool
  VectorClock host_seen;
  double host_time = 0;
  std::map<char*, std::weak_ptr<Block>> blocks;
  std::map<char*, PinnedRange> pinned;
  std::vector<CopyRecord> copy_log;
  std::vector<Race> races;
  std::map<std::string, uint64_t> op_counts;
  bool track = true, strict = false, late = true;
};

World& world();

// accounting.cpp
size_t rounded(size_t bytes);
bool take(int device, size_t bytes);  // false: out of memory, nothing changed but the counter
void give_back(int device, size_t bytes);
size_t free_bytes(int device);  // makes a context, as asking the driver does
void empty_cache();
std::shared_ptr<Block> add_block(void* data, size_t bytes, int device, StreamId stream, std::shared_ptr<void> memory);
std::shared_ptr<Block> find_block(const void* data);  // by an address anywhere inside it; null if unknown
void free_block(const std::shared_ptr<Block>& block);
PinnedRange* find_pinned(const void* data);
void pin(void* data, size_t bytes);
void unpin(void* data);
int register_host(void* data, size_t bytes);  // 0 or the CUDA runtime's error number
int unregister_host(void* data);
size_t pinned_bytes();
inline thread_local int left_error = 0;  // of the last call of the CUDA runtime that failed; the next kernel raises it
void count_copy(const CopyRecord& record);
void reset();

// streams.cpp
Stream& stream(StreamId id);
StreamId stream_from_pool(int device, int priority);
uint64_t issue(StreamId id);  // starts an operation: orders it after what the host knows, returns its clock
void enqueue(StreamId id, Task task);
void drain(StreamId id);
EventPtr record_event(StreamId id);
void wait_event(StreamId id, const EventPtr& event);
bool query_event(const EventPtr& event);
void sync_event(const EventPtr& event);
bool query_stream(StreamId id);
void sync_stream(StreamId id);
void sync_device(int device);

// clock.cpp
void charge_compute(StreamId id, int device, double bytes, double flops);
void charge_copy(StreamId id, Link link, uint64_t bytes, bool pageable);

// tracker.cpp
void touch(Block& block, size_t lo, size_t hi, bool write, StreamId id, uint64_t clock, const std::string& op);
void check_free(const Block& block);
void report(Race race, bool may_raise = true);

}  // namespace simdev
