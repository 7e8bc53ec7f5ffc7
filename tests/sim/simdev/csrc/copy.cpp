// Copies: the only operations that run late, and the only ones that cross links.
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>

#include "backend.h"

namespace simdev {

namespace {

// One plain run of bytes can serve both tensors: same type, same dense layout.
bool plain_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || !a.is_non_overlapping_and_dense()) return false;
  for (int64_t i = 0; i < a.dim(); i++)
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  return true;
}

uint64_t checksum(const at::Tensor& t) {
  uint64_t sum = 14695981039346656037ull, word = 0;
  auto* p = static_cast<const char*>(t.const_data_ptr());
  for (size_t n = t.nbytes(); n;) {
    size_t step = std::min(n, sizeof word);
    std::memcpy(&word, p, step);
    sum = (sum ^ word) * 1099511628211ull;
    p += step;
    n -= step;
  }
  return sum;
}

// What is known of the host's end of a copy.
struct HostSide {
  bool pinned = false, watched = false;
  HostUse use{};
  uint64_t before = 0;  // checksum of a watched source when the copy was issued
};

HostSide host_side(const at::Tensor& t, bool is_source, bool non_blocking) {
  HostSide side;
  auto [lo, hi] = byte_range(t);
  auto* base = static_cast<char*>(const_cast<void*>(t.storage().data()));
  side.use = {base + lo, base + hi, !is_source};
  auto* range = find_pinned(side.use.lo);
  side.pinned = range != nullptr;
  if (!side.pinned || !non_blocking) return side;
  bool shared = false, being_written = false;
  for (auto& other : range->uses) {
    if (other.lo >= side.use.hi || side.use.lo >= other.hi) continue;
    shared = true;
    being_written |= other.incoming;
  }
  range->uses.push_back(side.use);
  if (!t.is_contiguous() || !world().track || !world().late) return side;
  side.watched = is_source && !being_written;  // else it changes by right before this copy runs
  if (side.watched) side.before = checksum(t);
  if (!is_source && !shared) std::memset(side.use.lo, 0xFF, t.nbytes());  // nobody may look before the copy has run
  return side;
}

void finish_host_side(const HostSide& side, const at::Tensor& t, StreamId id, int device) {
  if (auto* range = find_pinned(side.use.lo)) {
    auto same = [&](const HostUse& u) { return u.lo == side.use.lo && u.hi == side.use.hi; };
    auto it = std::find_if(range->uses.begin(), range->uses.end(), same);
    if (it != range->uses.end()) range->uses.erase(it);
  }
  if (!side.watched || checksum(t) == side.before) return;
  Race race;
  race.kind = "host overwrite";
  race.op = "host write";
  race.other_op = "copy";
  race.device = device;
  race.hi = t.nbytes();
  race.stream = race.other_stream = id;
  race.message = "host overwrite: pinned memory of " + std::to_string(race.hi) +
                 " bytes changed between the issue of its copy to device " + std::to_string(device) + " on stream " +
                 std::to_string(id) + " and the copy itself";
  report(std::move(race), false);
}

void run_copy(at::Tensor& dst, const at::Tensor& src) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  c10::impl::ExcludeDispatchKeyGuard no_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  c10::InferenceMode inference;
  dst.copy_(src);
}

// A copy that needs no conversion on the way, or none that has to leave the device.
void transfer(const at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  int from = device_number(src), to = device_number(dst);
  Aliases aliases(/*hold_blocks=*/true);
  // Queued work must not own an object that Python can see, hence a new tensor for the host side too.
  auto stand_in = [&](const at::Tensor& t) {
    return is_ours(t) ? aliases.to_cpu(t) : tensor_over(t.storage(), c10::DispatchKey::CPU, t);
  };
  auto cpu_src = stand_in(src), cpu_dst = stand_in(dst);
  Lock lock;
  StreamId id = current_stream(from != kHost ? from : to);
  bool host_link = from == kHost || to == kHost, peer = !host_link && from != to;
  if (peer) wait_event(id, record_event(current_stream(to)));  // torch's barrier between the two current streams
  auto clock = issue(id);
  note_access(src, false, id, clock, "copy");  // may raise: before anything is counted
  note_access(dst, true, id, clock, "copy");

  if (from != to) count_copy({from, to, dst.nbytes(), id, non_blocking});
  HostSide side;
  if (host_link) side = host_side(from == kHost ? src : dst, from == kHost, non_blocking);
  bool pageable = host_link && !side.pinned;
  if (from == to)
    charge_compute(id, to, double(src.nbytes() + dst.nbytes()), 0);
  else
    charge_copy(id, {from, to}, dst.nbytes(), pageable);

  if (from == kHost && (pageable || !non_blocking)) cpu_src = cpu_src.clone();  // staged before the call returns
  auto source = block_of(src), target = block_of(dst);
  if (source) source->pending[id]++;
  if (target) target->pending[id]++;
  enqueue(id, [=]() mutable {
    run_copy(cpu_dst, cpu_src);
    if (source) source->pending[id]--;
    if (target) target->pending[id]--;
    if (side.pinned && non_blocking) finish_host_side(side, from == kHost ? cpu_src : cpu_dst, id, std::max(from, to));
  });
  if (peer) wait_event(current_stream(to), record_event(id));
  bool wait = host_link && (!non_blocking || (to == kHost && pageable));
  if (wait)
    sync_stream(id);
  else if (!world().late)
    drain(id);
}

// Between devices a kernel can convert on the fly only where it can reach both; everything else goes through contiguous
// temporaries, converted on the device side of a non_blocking copy and on the host side of a blocking one.
void transfer_through_temporaries(const at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  bool convert_at_source = is_ours(src) == non_blocking;
  auto options = dst.options().dtype(convert_at_source ? dst.scalar_type() : src.scalar_type());
  bool direct = dst.is_contiguous() && options.dtype() == dst.dtype();
  auto source = (convert_at_source ? src.to(dst.scalar_type()) : src).contiguous();
  auto target = direct ? dst : at::empty(dst.sizes(), options);
  target.copy_(source, non_blocking);
  if (!direct) target.device().is_cpu() ? (void)dst.copy_(target) : transfer(dst, target, non_blocking);
}

at::Tensor& copy_(at::Tensor& dst, const at::Tensor& source, bool non_blocking) {
  if (dst.is_same(source) || !dst.numel()) return dst;
  for (const auto& t : {dst, source})
    TORCH_CHECK(is_ours(t) || t.device().is_cpu(), "a simulated device cannot copy to or from ", t.device());
  auto src = source.expand_as(dst);
  int from = device_number(src), to = device_number(dst);
  bool reachable = from == to;
  if (!reachable && from != kHost && to != kHost) {
    Lock lock;
    reachable = world().links[{from, to}].peer;
  }
  if (reachable || plain_bytes(src, dst))
    transfer(dst, src, non_blocking);
  else
    transfer_through_temporaries(dst, src.resolve_conj().resolve_neg(), non_blocking);
  return dst;
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  auto target = dst;
  return copy_(target, src, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  auto target = dst;
  target.resize_(src.sizes());
  return copy_(target, src, false);
}

void register_copies(torch::Library& m) {
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

}  // namespace

SIMDEV_LIBRARY(aten, m) {
  register_copies(m);
}

}  // namespace simdev
