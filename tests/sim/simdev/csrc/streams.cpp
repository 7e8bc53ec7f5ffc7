// Streams and events. A stream is a FIFO whose queued copies run only when something waits for them: as late as the
// program allows, and the same on every run. Compute runs at issue, after its own stream has been drained.
#include "world.h"

namespace simdev {

std::vector<Task>& finished_tasks();

namespace {

void join(VectorClock& into, const VectorClock& from) {
  for (auto& [id, clock] : from) {
    auto& mine = into[id];
    mine = std::max(mine, clock);
  }
}

void run_front(Stream& s) {
  auto task = std::move(s.tasks.front());
  s.tasks.pop_front();
  task();
  finished_tasks().push_back(std::move(task));
}

void drain_until(const EventPtr& event) {
  auto& s = stream(event->stream);
  while (!event->done && !s.tasks.empty()) run_front(s);
}

void host_learns(const VectorClock& seen, double time) {
  join(world().host_seen, seen);
  world().host_time = std::max(world().host_time, time);
}

}  // namespace

Stream& stream(StreamId id) {
  auto [it, fresh] = world().streams.try_emplace(id);
  if (fresh) it->second.device = id < kMaxDevices ? int(id) : int((id - kMaxDevices) / (kPriorities * kPoolStreams));
  return it->second;
}

// Like torch, hands out a fixed set of streams per device and priority in turn.
StreamId stream_from_pool(int device, int priority) {
  int level = std::min(std::max(-priority, 0), kPriorities - 1);
  int n = world().pool_next[{device, level}]++ % kPoolStreams;
  StreamId id = kMaxDevices + (device * kPriorities + level) * kPoolStreams + n;
  stream(id);
  return id;
}

uint64_t issue(StreamId id) {
  auto& s = stream(id);
  join(s.seen, world().host_seen);
  s.time = std::max(s.time, world().host_time);
  return ++s.seen[id];
}

void enqueue(StreamId id, Task task) {
  stream(id).tasks.push_back(std::move(task));
}

void drain(StreamId id) {
  auto& s = stream(id);
  while (!s.tasks.empty()) run_front(s);
}

EventPtr record_event(StreamId id) {
  issue(id);
  auto event = std::make_shared<Event>();
  event->stream = id;
  event->seen = stream(id).seen;
  event->time = stream(id).time;
  enqueue(id, [event] { event->done = true; });
  return event;
}

void wait_event(StreamId id, const EventPtr& event) {
  auto& s = stream(id);
  join(s.seen, event->seen);
  s.time = std::max(s.time, event->time);
  enqueue(id, [event] { drain_until(event); });
}

// The first poll of unfinished work says no and lets it run, so that a polling loop both sees "not yet" and ends.
bool query_event(const EventPtr& event) {
  if (!event->done) {
    drain_until(event);
    return false;
  }
  host_learns(event->seen, event->time);
  return true;
}

void sync_event(const EventPtr& event) {
  drain_until(event);
  host_learns(event->seen, event->time);
}

bool query_stream(StreamId id) {
  if (!stream(id).tasks.empty()) {
    drain(id);
    return false;
  }
  sync_stream(id);
  return true;
}

void sync_stream(StreamId id) {
  drain(id);
  host_learns(stream(id).seen, stream(id).time);
}

void sync_device(int device) {
  std::vector<StreamId> ids;
  for (auto& [id, s] : world().streams)
    if (s.device == device) ids.push_back(id);
  for (auto id : ids) sync_stream(id);
}

}  // namespace simdev
