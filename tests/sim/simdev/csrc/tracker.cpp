// The race tracker: vector clocks per stream, accesses per byte range of every block.
#include <optional>
#include <stdexcept>

#include "world.h"

namespace simdev {

namespace {

bool ordered(const VectorClock& seen, const Access& a) {
  auto it = seen.find(a.stream);
  return it != seen.end() && it->second >= a.clock;
}

std::string describe(const Access& a) {
  return a.op + (a.write ? " (write)" : " (read)") + " on stream " + std::to_string(a.stream);
}

Race race_between(const Block& block, const Access& now, const Access& before) {
  Race race;
  race.kind = now.write ? (before.write ? "write-after-write" : "write-after-read") : "read-after-write";
  race.op = now.op;
  race.other_op = before.op;
  race.device = block.device;
  race.lo = std::max(now.lo, before.lo);
  race.hi = std::min(now.hi, before.hi);
  race.stream = now.stream;
  race.other_stream = before.stream;
  race.message = race.kind + ": " + describe(now) + " is not ordered after " + describe(before) + ", bytes [" +
                 std::to_string(race.lo) + ", " + std::to_string(race.hi) + ") of a " + std::to_string(block.bytes) +
                 "-byte block on device " + std::to_string(block.device);
  return race;
}

}  // namespace

void report(Race race, bool may_raise) {
  auto message = race.message;
  world().races.push_back(std::move(race));
  if (world().strict && may_raise) throw std::runtime_error("simulated device: " + message);
}

// One access of the operation with number `clock` on stream `id`. Forgets what can no longer race: accesses that the
// host knows to be over, and accesses that this one covers and is ordered after.
void touch(Block& block, size_t lo, size_t hi, bool write, StreamId id, uint64_t clock, const std::string& op) {
  if (!world().track || hi <= lo) return;
  const auto& seen = stream(id).seen;
  Access now{lo, hi, write, id, clock, op};
  std::vector<Access> keep;
  std::optional<Race> found;
  for (auto& a : block.accesses) {
    bool overlaps = a.lo < hi && lo < a.hi;
    bool before = a.stream == id || ordered(seen, a);
    if (!found && overlaps && !before && (a.write || write)) found = race_between(block, now, a);
    bool covered = before && lo <= a.lo && a.hi <= hi && (write || !a.write);
    if (!covered && !ordered(world().host_seen, a)) keep.push_back(std::move(a));
  }
  keep.push_back(std::move(now));
  block.accesses.swap(keep);
  if (found) report(std::move(*found));
}

// The caching allocator reuses memory in the order of the stream that it was allocated on. A use on another stream must
// be known to be over there, or have been announced with record_stream.
void check_free(const Block& block) {
  if (!world().track) return;
  const auto& seen = stream(block.stream).seen;
  for (auto& a : block.accesses) {
    if (a.stream == block.stream || block.recorded.count(a.stream)) continue;
    if (ordered(seen, a) || ordered(world().host_seen, a)) continue;
    Race race;
    race.kind = "missing record_stream";
    race.op = "free";
    race.other_op = a.op;
    race.device = block.device;
    race.lo = a.lo;
    race.hi = a.hi;
    race.stream = block.stream;
    race.other_stream = a.stream;
    race.message = "missing record_stream: a " + std::to_string(block.bytes) + "-byte block of stream " +
                   std::to_string(block.stream) + " on device " + std::to_string(block.device) + " was freed while " +
                   describe(a) + " may still use bytes [" + std::to_string(a.lo) + ", " + std::to_string(a.hi) + ")";
    report(std::move(race), false);  // a destructor must not throw
    return;
  }
}

}  // namespace simdev
