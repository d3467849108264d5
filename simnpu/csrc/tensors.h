// Tensors as kernels see them, and the elements that a tensor covers in memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "simulator.h"

namespace simnpu {

inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

unsigned char poison_of(at::ScalarType dtype);

// A new device tensor, poisoned. Its elements are contiguous if `strides` is null.
at::Tensor make_device_tensor(at::IntArrayRef sizes, const at::IntArrayRef* strides,
                              at::ScalarType dtype, c10::Device device);

// The tensor by the addresses of the host's mapping, which kernels use. It doesn't keep the device
// memory alive, but knows when that was freed.
at::Tensor kernel_view(const at::Tensor& device_tensor);
// A tensor over the same host memory that owns nothing.
at::Tensor host_view(const at::Tensor& host_tensor);
// The same tensor without data, for shape inference.
at::Tensor meta_like(const at::Tensor& tensor);

// Raises if memory was freed before the operation that uses it ran; the message gives the remedy.
void check_alive(const at::Tensor& kernel_view, const char* role);

// "source float32 [4, 2] at 0x7f.. on npu:0"; takes kernel views too.
std::string describe(const at::Tensor& tensor, const char* role);

// Kernels run below autograd, autocast and Python's modes, in whatever thread they run.
class KernelScope {
 public:
  KernelScope();

 private:
  c10::impl::ForceDispatchKeyGuard guard_;
};

// Fills the elements that the tensor covers, and nothing between them.
void fill_bytes(const at::Tensor& host_tensor, unsigned char value);
// A digest of the elements that the tensor covers.
uint64_t digest_of(const at::Tensor& host_tensor);
// The first address that the tensor covers and the one after the last.
std::pair<uintptr_t, uintptr_t> span_of(const at::Tensor& host_tensor);

}  // namespace simnpu
