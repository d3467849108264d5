// Copies between host and device.
#pragma once

#include <ATen/core/Tensor.h>

namespace simnpu {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);
at::Scalar read_scalar(const at::Tensor& tensor);

}  // namespace simnpu
