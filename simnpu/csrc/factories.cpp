// Operators that make tensors or views: none of them touches data.
#include "factories.h"

#include "attention.h"

#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "convolution.h"
#include "copies.h"
#include "tensors.h"

namespace simnpu {
namespace {

c10::Device device_or_current(std::optional<c10::Device> device) {
  const bool is_named = device.has_value() && device->index() >= 0;
  return {kDevice, is_named ? device->index() : current_device()};
}

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "simnpu: only host memory can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "simnpu: the layout ", *layout,
              " isn't supported on this device: only strided tensors are");
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  check_options(layout, pin_memory);
  auto made = make_device_tensor(sizes, nullptr, c10::dtype_or_default(dtype),
                                 device_or_current(device));
  if (format.has_value() && *format != at::MemoryFormat::Contiguous) {
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return made;
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  return make_device_tensor(sizes, &strides, c10::dtype_or_default(dtype),
                            device_or_current(device));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const size_t needed = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(),
                                                                   self.storage_offset());
  if (needed > self.storage().nbytes()) {
    resize_storage(self.storage(), needed);
  }
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_part(at::Tensor& self, at::Storage storage, int64_t offset,
                             c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::cpu::set_(self, std::move(storage), offset, sizes, strides);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_nothing(at::Tensor& self) {
  const auto none = make_device_tensor({0}, nullptr, self.scalar_type(), self.device());
  return at::native::set_tensor_(self, none);
}

void record_tensor_stream(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto& simulator = Simulator::get();
  const auto device = storage.device();
  const c10::DeviceGuard guard(device);
  auto grown = allocate_device(bytes, kPoison);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    const void* from = simulator.shadow(storage.data());
    void* to = simulator.shadow(grown.get());
    Lock lock;
    simulator.enqueue(simulator.current_queue(device.index()),
                      {"grow storage", [=] { std::memcpy(to, from, kept); }, nullptr, nullptr});
  }
  auto& changed = const_cast<c10::Storage&>(storage);
  changed.set_data_ptr(std::move(grown));
  changed.set_nbytes(bytes);
}

void register_factories() {
  // The registrations are never removed: at exit that would be of no use.
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten",
                                             c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize_);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_part);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_tensor_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_scalar);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  // Copies take conjugate and negative tensors as they are. Otherwise torch would resolve these by
  // a copy, and that copy by another one, without end.
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    auto& bits = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    bits.impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
  register_attention();
}

}  // namespace simnpu
