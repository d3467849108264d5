// torch's names of its dtypes, which C++ spells differently.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace simnpu {

// "float32"; for kinds that aren't known here what C++ calls it.
std::string dtype_name(c10::ScalarType dtype);
// Undefined if there is none of that name.
c10::ScalarType dtype_named(const std::string& name);

}  // namespace simnpu
