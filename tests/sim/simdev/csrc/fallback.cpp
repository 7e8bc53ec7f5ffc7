// Every operator without a kernel of its own: check devices, note the accesses, run torch's CPU kernel over the same
// bytes.
#include <set>

#include "backend.h"

namespace simdev {

namespace {

bool starts_with(const std::string& s, const char* prefix) {
  return s.rfind(prefix, 0) == 0;
}

// Indexing accepts index tensors on the CPU, as real devices do.
bool takes_cpu_indices(const std::string& name) {
  static const std::set<std::string> names{"aten::index",         "aten::index_put",
                                           "aten::index_put_",    "aten::_index_put_impl_",
                                           "aten::_unsafe_index", "aten::_unsafe_index_put"};
  return names.count(name) > 0;
}

// Operators whose result's shape depends on the data: the host has to wait for them.
bool reads_back(const std::string& name) {
  static const std::set<std::string> names{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                           "aten::unique_consecutive"};
  return names.count(name) > 0;
}

double elements(const at::Tensor& t) {
  return double(t.numel());
}

// Multiply-adds count as two. Shapes only; 0 for operators that are bound by memory.
double flops_of(const std::string& name, const std::vector<at::Tensor>& in, const std::vector<at::Tensor>& out) {
  auto matmul = [](const at::Tensor& a, const at::Tensor& b) { return 2 * elements(a) * double(b.size(-1)); };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::_scaled_mm") return matmul(in[0], in[1]);
  if (name == "aten::addmm" || name == "aten::baddbmm") return matmul(in[1], in[2]);
  if (name == "aten::linear") return 2 * elements(in[0]) * double(in[1].size(0));
  if (name == "aten::convolution")
    return 2 * elements(out[0]) * elements(in[1]) / double(std::max<int64_t>(in[1].size(0), 1));
  if (starts_with(name, "aten::_scaled_dot_product_"))
    return 2 * elements(in[0]) * double(in[1].size(-2)) * 2;  // queries x keys, then weights x values
  return 0;
}

// One call of one operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - schema_.arguments().size()) {}

  void run() {
    gather();
    check_devices();
    issue_on_stream();
    replace_arguments();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    aliases_.write_back();
    first_ = stack_->size() - schema_.returns().size();
    bool wait = replace_results() || reads_back(schema_.name());
    finish(wait);
    if (target_ && !is_view_) {  // as torch does after each kernel of CUDA
      int error = std::exchange(left_error, 0);
      TORCH_CHECK(!error, "CUDA error ", error, " of an earlier call");
    }
  }

 private:
  void gather() {
    for (size_t i = 0; i < schema_.arguments().size(); i++) {
      auto& value = (*stack_)[first_ + i];
      auto* alias = schema_.arguments()[i].alias_info();
      bool write = alias && alias->isWrite();
      if (value.isTensor()) {
        see(value.toTensor(), write, i == 0);
      } else if (value.isTensorList()) {
        for (const auto& t : value.toTensorVector()) see(t, write, false);
      } else if (value.isOptionalTensorList()) {
        for (const auto& t : value.toOptionalTensorVector())
          if (t) see(*t, write, false);
      } else if (value.isDevice()) {
        asked_ = value.toDevice();
      }
    }
    device_ = target_ ? target_->index() : device_index(asked_);
    for (auto& result : schema_.returns()) is_view_ |= result.alias_info() && !result.alias_info()->isWrite();
  }

  void see(const at::Tensor& t, bool write, bool self) {
    if (!t.defined()) return;
    tensors_.push_back(t);
    writes_.push_back(write);
    is_self_.push_back(self);
    if (is_ours(t) && !target_) target_ = t.device();
  }

  void check_devices() const {
    if (!target_) return;
    bool cpu_indices = takes_cpu_indices(schema_.name());
    for (size_t i = 0; i < tensors_.size(); i++) {
      const auto& t = tensors_[i];
      bool cpu_allowed = t.device().is_cpu() && (t.dim() == 0 || (cpu_indices && !is_self_[i]));
      TORCH_CHECK(t.device() == *target_ || cpu_allowed,
                  "Expected all tensors to be on the same device, but found at least two devices, ", *target_, " and ",
                  t.device(), "! (when checking arguments of ", schema_.name(), ")");
    }
  }

  // Views touch no memory and wait for nothing.
  void issue_on_stream() {
    Lock lock;
    stream_ = current_stream(device_);
    world().op_counts[c10::toString(schema_.operator_name())]++;
    if (is_view_) return;
    drain(stream_);
    clock_ = issue(stream_);
    for (size_t i = 0; i < tensors_.size(); i++) note_access(tensors_[i], writes_[i], stream_, clock_, schema_.name());
  }

  void replace_arguments() {
    for (size_t i = 0; i < schema_.arguments().size(); i++) {
      auto& value = (*stack_)[first_ + i];
      if (value.isTensor()) {
        value = aliases_.to_cpu(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& t : value.toTensorVector()) list.push_back(aliases_.to_cpu(t));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& t : value.toOptionalTensorVector())
          list.push_back(t ? std::make_optional(aliases_.to_cpu(*t)) : std::nullopt);
        value = list;
      } else if (value.isDevice()) {
        if (value.toDevice().type() == kType) value = c10::Device(c10::kCPU);
      } else if (value.isGenerator()) {
        value = cpu_generator(value.toGenerator());
      } else if (value.isNone() && schema_.arguments()[i].name() == "generator") {
        value = cpu_generator(default_generator(device_));
      }
    }
  }

  // Returns whether a result is a plain number, which the host can only have after waiting.
  bool replace_results() {
    bool plain = false;
    if (asked_ && asked_->type() != kType) return plain;
    for (size_t i = first_; i < stack_->size(); i++) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = aliases_.to_device(value.toTensor(), device_);
        results_.push_back(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& t : value.toTensorVector()) list.push_back(aliases_.to_device(t, device_));
        value = list;
      } else {
        plain = true;
      }
    }
    return plain;
  }

  void finish(bool wait) {
    Lock lock;
    if (!is_view_) {
      double bytes = 0;
      for (auto& t : tensors_) bytes += double(t.nbytes());
      for (size_t i = 0; i < schema_.returns().size(); i++) {
        auto& value = (*stack_)[first_ + i];
        if (schema_.returns()[i].alias_info() || !value.isTensor() || !value.toTensor().defined()) continue;
        bytes += double(value.toTensor().nbytes());
        note_access(value.toTensor(), true, stream_, clock_, schema_.name());
      }
      charge_compute(stream_, device_, bytes, flops_of(schema_.name(), tensors_, results_));
    }
    if (wait) sync_stream(stream_);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t first_;  // of the arguments, later of the results
  Aliases aliases_;
  std::vector<at::Tensor> tensors_, results_;
  std::vector<bool> writes_, is_self_;
  std::optional<c10::Device> target_, asked_;
  int device_ = 0;
  StreamId stream_ = 0;
  uint64_t clock_ = 0;
  bool is_view_ = false;
};

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

}  // namespace simdev
