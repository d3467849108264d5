// The shapes of an operator's results, before it runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "operators.h"

namespace simnpu {

struct ResultShape {
  bool is_defined = true;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<int64_t> sizes, strides;
};

// First the fresh results, then the out arguments, in the schema's order.
using ResultShapes = std::shared_ptr<const std::vector<ResultShape>>;

// Asks torch's Meta kernel, and remembers its answers: many of these kernels are Python, and take a
// hundred times as long as queueing. Null if there is no such kernel, or if it needs the data.
// Errors in the arguments also give null: the CPU kernel raises them later.
ResultShapes infer_shapes(const c10::OperatorHandle& op, const OpTraits& traits,
                          const std::vector<c10::IValue>& arguments);

// Applies `change` to every tensor in a value, and replaces every device by `device`.
template <class Change>
c10::IValue map_tensors(const c10::IValue& value, c10::Device device, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  return value.isDevice() ? c10::IValue(device) : value;
}

template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) {
        visit(*tensor);
      }
    }
  }
}

}  // namespace simnpu
