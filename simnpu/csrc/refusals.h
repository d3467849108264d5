// Calls that the real device refuses, so that tests refuse them, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>
#include <vector>

namespace simnpu {

// Operator ("aten::index.Tensor", or "aten::index" for all its overloads), dtype ("float64", or
// "*" for any) and reason.
using Refusal = std::tuple<std::string, std::string, std::string>;

// Replaces the list. Raises for a dtype that isn't known.
void set_refusals(const std::vector<Refusal>& refusals);

bool has_refusals();
// Raises if the operator refuses this tensor's dtype.
void check_refused(const std::string& op, const at::Tensor& tensor);

}  // namespace simnpu
