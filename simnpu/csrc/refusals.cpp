#include "refusals.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "dtypes.h"
#include "simulator.h"

namespace simnpu {
namespace {

struct Rule {
  bool any_dtype;
  at::ScalarType dtype;
  std::string dtype_name, reason;
};

using Rules = std::unordered_map<std::string, std::vector<Rule>>;

// Every operation on every thread reads this; it is replaced as a whole.
struct Table {
  std::atomic<bool> has_rules{false};
  std::mutex mutex;
  std::shared_ptr<const Rules> rules = std::make_shared<Rules>();
};

Table& table() {
  static auto* table = new Table;
  return *table;
}

Rule rule_of(const Refusal& refusal) {
  const auto& [op, dtype, reason] = refusal;
  if (dtype == "*") {
    return {true, at::ScalarType::Undefined, dtype, reason};
  }
  const at::ScalarType found = dtype_named(dtype);
  TORCH_CHECK_VALUE(found != at::ScalarType::Undefined, "simnpu: a refusal of ", op,
                    " names the dtype '", dtype, "', which isn't known");
  return {false, found, dtype, reason};
}

void check_rules(const Rules& rules, const std::string& name, const std::string& op,
                 const at::Tensor& tensor) {
  auto found = rules.find(name);
  if (found == rules.end()) {
    return;
  }
  for (auto& rule : found->second) {
    const bool applies = rule.any_dtype || rule.dtype == tensor.scalar_type();
    TORCH_CHECK(!applies, "simnpu: ", op, " refuses ",
                rule.any_dtype ? "every dtype" : rule.dtype_name, " as ", rule.reason,
                "; install(refuse=None) turns this off");
  }
}

}  // namespace

void set_refusals(const std::vector<Refusal>& refusals) {
  auto rules = std::make_shared<Rules>();
  for (auto& refusal : refusals) {
    (*rules)[std::get<0>(refusal)].push_back(rule_of(refusal));
  }
  std::lock_guard<std::mutex> guard(table().mutex);
  table().has_rules = !rules->empty();
  table().rules = std::move(rules);
}

bool has_refusals() { return table().has_rules; }

void check_refused(const std::string& op, const at::Tensor& tensor) {
  if (!has_refusals() || !tensor.defined()) {
    return;
  }
  std::shared_ptr<const Rules> rules;
  {
    std::lock_guard<std::mutex> guard(table().mutex);
    rules = table().rules;
  }
  check_rules(*rules, op, op, tensor);
  const size_t dot = op.find('.');
  if (dot != std::string::npos) {
    check_rules(*rules, op.substr(0, dot), op, tensor);
  }
}

}  // namespace simnpu
