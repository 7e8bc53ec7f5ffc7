// Operators that cannot fall back: allocation, storage, streams; and those for which torch would otherwise choose
// another algorithm than on the CPU, which would not be equal bit for bit.
#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty.h>
#include <ATen/autocast_mode.h>

#include "backend.h"

namespace simdev {

namespace {

using Options = std::optional<at::ScalarType>;

at::ScalarType type_or_default(Options dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

at::Tensor empty(c10::SymIntArrayRef size, Options dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(kType, device_index(device)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator(), c10::DispatchKeySet(kKey),
                                   type_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, Options dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(kType, device_index(device)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator(), c10::DispatchKeySet(kKey), type_or_default(dtype));
}

at::Tensor& set_view(at::Tensor& t, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                     c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  std::vector<int64_t> strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  if (strides.empty() && !sizes.empty()) {
    strides.assign(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  }
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return t;
}

at::Tensor& set_storage(at::Tensor& t, c10::Storage storage) {
  c10::SymInt length(int64_t(storage.nbytes() / t.element_size()));
  return set_view(t, storage, 0, {length}, {});
}

at::Tensor& set_nothing(at::Tensor& t) {
  c10::DeviceGuard guard(t.device());
  c10::Storage none(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, &device_allocator(), true));
  return set_view(t, none, 0, {c10::SymInt(0)}, {});
}

void record_stream(at::Tensor& t, c10::Stream s) {
  device_allocator().recordStream(t.storage().data_ptr(), s);
}

int64_t attention_choice(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool gqa) {
  Aliases aliases;
  bool masked = mask && mask->defined();
  auto cpu_mask = masked ? std::make_optional(aliases.to_cpu(*mask)) : std::nullopt;
  auto choice = at::_fused_sdp_choice(aliases.to_cpu(q), aliases.to_cpu(k), aliases.to_cpu(v), cpu_mask, dropout,
                                      causal, scale, gqa);
#ifdef SIMDEV_CUDA
  // CUDA's flash attention takes no mask; its efficient attention does.
  if (masked && choice == int64_t(at::SDPBackend::flash_attention)) return int64_t(at::SDPBackend::efficient_attention);
#endif
  return choice;
}

#if defined(SIMDEV_CUDA)
auto flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool causal, bool,
                     std::optional<double> scale) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, {}, scale);
  auto none = at::empty({0}, q.options().dtype(at::kLong));
  return std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor,
                    at::Tensor>(out, lse, none, none, q.sym_size(2), k.sym_size(2), none, none, none);
}

auto efficient_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& bias, bool, double dropout, bool causal,
                         std::optional<double> scale) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, bias, scale);
  auto none = at::empty({0}, q.options().dtype(at::kLong));
  return std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(out, lse, none, none);
}
#endif

void register_kernels(torch::Library& m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("record_stream", record_stream);
  for (auto name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm",
                    "native_group_norm_backward", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

SIMDEV_LIBRARY(_, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
SIMDEV_LIBRARY(aten, m) {
  register_kernels(m);
#if defined(SIMDEV_CUDA)
  m.impl("_scaled_dot_product_flash_attention", flash_attention);
  m.impl("_scaled_dot_product_efficient_attention", efficient_attention);
#elif defined(SIMDEV_XPU) || defined(SIMDEV_MPS)  // CPU and CUDA builds have no place for their choice of an attention
  m.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&fallback>());
#endif
}
#if !defined(SIMDEV_CUDA) && !defined(SIMDEV_XPU) && !defined(SIMDEV_MPS)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}
#endif

}  // namespace simdev

namespace at::native {
#if defined(SIMDEV_CUDA)
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &simdev::attention_choice);
#elif !defined(SIMDEV_XPU) && !defined(SIMDEV_MPS)
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simdev::attention_choice);
#endif
}  // namespace at::native
