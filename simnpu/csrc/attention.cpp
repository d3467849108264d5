#include "attention.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "tensors.h"

namespace simnpu {
namespace {

using Mask = std::optional<at::Tensor>;

// torch has a fused kernel for CPUs, and an operator that a device of this kind may implement.
constexpr auto kStepByStep = static_cast<int64_t>(sdp::SDPBackend::math);
constexpr auto kOwn = static_cast<int64_t>(sdp::SDPBackend::overrideable);
constexpr auto kFusedOfCPU = static_cast<int64_t>(sdp::SDPBackend::flash_attention);

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const Mask& mask, double dropout, bool causal, std::optional<double> scale,
               bool grouped) {
  const Mask seen = mask.has_value() && mask->defined() ? Mask(kernel_view(*mask)) : std::nullopt;
  const auto choice =
      at::_fused_sdp_choice(kernel_view(query), kernel_view(key), kernel_view(value), seen, dropout,
                            causal, scale, grouped);
  return choice == kFusedOfCPU ? kOwn : kStepByStep;
}

using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt,
                           at::Tensor, at::Tensor, at::Tensor>;

// The CPU's fused kernel is queued like any other kernel.
Outputs attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const Mask& mask, double dropout, bool causal, bool /*return_debug_mask*/,
               std::optional<double> scale) {
  auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, dropout, causal, mask, scale);
  return {output, log_sum, {}, {}, query.sym_size(2), key.sym_size(2), {}, {}, {}};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients attend_backward(const at::Tensor& gradient, const at::Tensor& query,
                          const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
                          std::array<bool, 4> /*wanted*/, const at::Tensor& output,
                          const at::Tensor& log_sum, const at::Tensor&, const at::Tensor&,
                          c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor&,
                          const at::Tensor&, std::optional<double> scale) {
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, output, log_sum, dropout, causal,
      mask.defined() ? Mask(mask) : std::nullopt, scale);
  return {of_query, of_key, of_value, {}};
}

}  // namespace

void register_attention() {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose);
  // The registrations are never removed: at exit that would be of no use.
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten",
                                             c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("_scaled_dot_product_fused_attention_overrideable", attend);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", attend_backward);
}

}  // namespace simnpu
