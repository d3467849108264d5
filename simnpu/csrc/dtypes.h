// torch's names of its dtypes, which C++ spells differently.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace simnpu {

// "float32"; for a dtype that isn't known here, its name in C++.
std::string dtype_name(c10::ScalarType dtype);
// Undefined if there is no dtype of that name.
c10::ScalarType dtype_named(const std::string& name);

}  // namespace simnpu
