// What the fallback must know of an operator; it is read from the operator's schema once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace simnpu {

struct OpTraits {
  explicit OpTraits(const c10::OperatorHandle& op);

  std::string name;              // "aten::index.Tensor"
  std::vector<std::string> arguments;
  std::vector<bool> is_written;  // per argument
  std::vector<size_t> outs;      // arguments that are resized to the result
  // For each return, the argument that is returned, or kFresh.
  std::vector<int> returns;
  bool has_fresh = false;
  bool is_view = false;
  bool returns_values = false;   // such as numbers: the caller has to wait for them
  bool is_pointwise = false;
  bool is_random = false;
  bool depends_on_data = false;  // the results' shapes can't be known at the call
  bool takes_host_tensors = false;
  const char* refusal = nullptr;  // why the device can't run it at all; null if it can
  int generator = -1;            // the argument that is the random generator

  static constexpr int kFresh = -1;
};

// Lives as long as the process.
const OpTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace simnpu
