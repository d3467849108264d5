#include "operators.h"

#include <ATen/core/enum_tag.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace simnpu {
namespace {

bool is_among(const std::unordered_set<std::string>& names, const std::string& name) {
  return names.count(name) > 0;
}

// Operators whose Meta kernel gives other shapes than the CPU kernel: it can't know them, or the
// two disagree.
bool has_unknown_shapes(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::nonzero",
      "aten::masked_select",
      "aten::_unique2",
      "aten::unique_consecutive",
      "aten::unique_dim",
      "aten::native_batch_norm",             // statistics are empty in evaluation, on the CPU only
      "aten::_native_batch_norm_legit",
      "aten::_embedding_bag",                // the CPU returns shorter bookkeeping tensors
      "aten::_embedding_bag_forward_only",
  };
  return is_among(names, name);
}

// Operators that take tensors of the host beside those of the device, on real accelerators too.
bool may_mix_devices(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index",           "aten::index_put",    "aten::index_put_",
      "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put",
  };
  return is_among(names, name);
}

const char* reason_to_refuse(const c10::OperatorHandle& op) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return "torch has no CPU kernel for it that could be run instead";
  }
  // torch's Meta kernels don't say that the result is quantized.
  if (op.schema().name().rfind("aten::quantize_per_", 0) == 0) {
    return "its result is quantized, and this device has strided tensors only";
  }
  return nullptr;
}

}  // namespace

OpTraits::OpTraits(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  name = c10::toString(schema.operator_name());
  std::vector<size_t> written;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool is_write = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    arguments.push_back(argument.name());
    is_written.push_back(is_write);
    if (is_write) {
      written.push_back(i);
    }
    if (is_write && argument.is_out()) {
      outs.push_back(i);
    }
    if (argument.name() == "generator") {
      generator = static_cast<int>(i);
    }
  }
  size_t next_written = 0;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() == nullptr) {
      returns.push_back(kFresh);
      has_fresh = true;
      returns_values |= result.type()->kind() != c10::TypeKind::TensorType;
    } else if (result.alias_info()->isWrite() && next_written < written.size()) {
      returns.push_back(static_cast<int>(written[next_written++]));
    } else {
      is_view = true;
    }
  }
  is_pointwise = op.hasTag(at::Tag::pointwise);
  is_random = op.hasTag(at::Tag::nondeterministic_seeded) || generator >= 0;
  depends_on_data = has_unknown_shapes(schema.name());
  takes_host_tensors = may_mix_devices(schema.name());
  refusal = reason_to_refuse(op);
}

const OpTraits& traits_of(const c10::OperatorHandle& op) {
  static auto& mutex = *new std::mutex;
  static auto& known =
      *new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpTraits>>;
  std::lock_guard<std::mutex> guard(mutex);
  auto& traits = known[&op.schema()];
  if (!traits) {
    traits = std::make_unique<OpTraits>(op);
  }
  return *traits;
}

}  // namespace simnpu
