// Virtual time. Every operation reserves its link or its device's compute units when it is issued; streams, events and
// the host carry times. Nothing sleeps: a schedule's length is a sum, equal on every machine.
#include <algorithm>

#include "world.h"

namespace simdev {

double Engine::reserve(double ready, double seconds) {
  double start = ready;
  auto next = busy_.upper_bound(start);
  if (next != busy_.begin()) start = std::max(start, std::prev(next)->second);
  while (next != busy_.end() && next->first < start + seconds) {
    start = std::max(start, next->second);
    ++next;
  }
  double end = start + seconds;
  if (next != busy_.begin() && std::prev(next)->second == start)
    std::prev(next)->second = end;  // keep one entry for back-to-back work
  else
    busy_[start] = end;
  return end;
}

void charge_compute(StreamId id, int device, double bytes, double flops) {
  auto& rate = world().compute[device];
  double seconds = rate.per_op;
  seconds += std::max(rate.bytes > 0 ? bytes / rate.bytes : 0, rate.flops > 0 ? flops / rate.flops : 0);
  if (seconds <= 0) return;
  auto& s = stream(id);
  s.time = rate.engine.reserve(s.time, seconds);
}

void charge_copy(StreamId id, Link link, uint64_t bytes, bool pageable) {
  auto& s = stream(id);
  auto cross = [&](Link leg) {
    auto& l = world().links[leg];
    double bandwidth = pageable && l.pageable_bandwidth > 0 ? l.pageable_bandwidth : l.bandwidth;
    if (bandwidth > 0) s.time = l.engine.reserve(s.time, double(bytes) / bandwidth);
  };
  bool through_host = link.first != kHost && link.second != kHost && !world().links[link].peer;
  if (through_host) {  // without peer access the driver bounces the bytes through host memory
    cross({link.first, kHost});
    cross({kHost, link.second});
  } else {
    cross(link);
  }
  if (pageable) world().host_time = std::max(world().host_time, s.time);  // the host does the staging
}

}  // namespace simdev
