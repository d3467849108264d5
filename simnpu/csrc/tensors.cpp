#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <sstream>

#include "dtypes.h"

namespace simnpu {
namespace {

// A tensor of the same shape over other memory. It has the whole storage and the offset, since some
// kernels (as_strided_scatter) reach beyond the tensor's elements.
at::Tensor over(const at::Tensor& tensor, c10::DataPtr data, c10::DispatchKey key) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data),
                       /*allocator=*/nullptr, /*resizable=*/false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                       c10::DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  if (tensor.is_conj()) {
    made._set_conj(true);
  }
  if (tensor.is_neg()) {
    made._set_neg(true);
  }
  return made;
}

// Calls visit(address, bytes) for each run of consecutive elements. Repeated elements (stride 0)
// are visited once.
template <class Visit>
void for_each_run(const at::Tensor& tensor, Visit visit) {
  if (tensor.numel() == 0) {
    return;
  }
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != 0) {
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
  }
  std::sort(dims.rbegin(), dims.rend());
  int64_t run = 1;
  while (!dims.empty() && dims.back().first == run) {
    run *= dims.back().second;
    dims.pop_back();
  }
  const auto width = static_cast<int64_t>(tensor.element_size());
  auto* base = static_cast<unsigned char*>(tensor.data_ptr());
  std::vector<int64_t> index(dims.size(), 0);
  for (;;) {
    int64_t offset = 0;
    for (size_t dim = 0; dim < dims.size(); ++dim) {
      offset += index[dim] * dims[dim].first;
    }
    visit(base + offset * width, static_cast<size_t>(run * width));
    size_t dim = dims.size();
    while (dim > 0 && ++index[dim - 1] == dims[dim - 1].second) {
      index[--dim] = 0;
    }
    if (dim == 0) {
      return;
    }
  }
}

uint64_t mix(uint64_t digest, const unsigned char* bytes, size_t count) {
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ull;
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    digest = (digest ^ word) * kPrime;
    digest ^= digest >> 32;
  }
  for (; i < count; ++i) {
    digest = (digest ^ bytes[i]) * kPrime;
    digest ^= digest >> 32;
  }
  return digest;
}

}  // namespace

unsigned char poison_of(at::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype) ? kNaNPoison : kPoison;
}

at::Tensor make_device_tensor(at::IntArrayRef sizes, const at::IntArrayRef* strides,
                              at::ScalarType dtype, c10::Device device) {
  at::detail::check_size_nonnegative(sizes);
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  const size_t bytes =
      strides == nullptr
          ? at::detail::computeStorageNbytesContiguous(sizes, type.itemsize())
          : at::detail::computeStorageNbytes(sizes, *strides, type.itemsize());
  const c10::DeviceGuard guard(device);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, allocate_device(bytes, poison_of(dtype)),
      device_allocator(), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  if (strides != nullptr) {
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, *strides);
  } else {
    made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  return made;
}

at::Tensor kernel_view(const at::Tensor& device_tensor) {
  const auto& data = device_tensor.storage().data_ptr();
  Block* block = block_of(data);
  void* address = block == nullptr ? nullptr : Simulator::get().arena(block->device).shadow_of(data.get());
  const c10::Device cpu(c10::DeviceType::CPU);
  if (block == nullptr) {
    return over(device_tensor, c10::DataPtr(nullptr, cpu), c10::DispatchKey::CPU);
  }
  ++block->holders;
  return over(device_tensor, c10::DataPtr(address, block, &Block::release, cpu),
              c10::DispatchKey::CPU);
}

at::Tensor host_view(const at::Tensor& host_tensor) {
  void* address = const_cast<void*>(host_tensor.storage().data());
  return over(host_tensor, c10::DataPtr(address, c10::Device(c10::DeviceType::CPU)),
              c10::DispatchKey::CPU);
}

at::Tensor meta_like(const at::Tensor& tensor) {
  return over(tensor, c10::DataPtr(nullptr, c10::Device(c10::DeviceType::Meta)),
              c10::DispatchKey::Meta);
}

void check_alive(const at::Tensor& view, const char* role) {
  if (!view.defined() || !view.has_storage()) {
    return;
  }
  const Block* block = block_of(view.storage().data_ptr());
  TORCH_CHECK(block == nullptr || !block->freed, "device memory was freed before it ran. A stream ",
              "other than the one that allocated a tensor must be named to it: ",
              "tensor.record_stream(stream)\n  ", describe(view, role));
}

std::string describe(const at::Tensor& tensor, const char* role) {
  std::ostringstream text;
  const void* raw = tensor.numel() == 0 ? nullptr : tensor.const_data_ptr();
  const void* address = is_on_device(tensor) ? raw : Simulator::get().unshadow(raw);
  text << role << ' ' << dtype_name(tensor.scalar_type()) << ' ' << tensor.sizes() << " at "
       << address;
  const auto device = Simulator::get().device_of(address);
  if (device >= 0) {
    text << " on " << c10::Device(kDevice, device);
  }
  return text.str();
}

KernelScope::KernelScope()
    : guard_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
             c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
                 c10::python_ks | c10::default_excluded_set) {}

void fill_bytes(const at::Tensor& host_tensor, unsigned char value) {
  for_each_run(host_tensor, [value](unsigned char* run, size_t bytes) {
    std::memset(run, value, bytes);
  });
}

uint64_t digest_of(const at::Tensor& host_tensor) {
  uint64_t digest = 1;
  for_each_run(host_tensor, [&digest](const unsigned char* run, size_t bytes) {
    digest = mix(digest, run, bytes);
  });
  return digest;
}

std::pair<uintptr_t, uintptr_t> span_of(const at::Tensor& host_tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(host_tensor.data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < host_tensor.dim(); ++dim) {
    last += (host_tensor.size(dim) - 1) * host_tensor.stride(dim);
  }
  return {begin, begin + static_cast<uintptr_t>(last + 1) * host_tensor.element_size()};
}

}  // namespace simnpu
