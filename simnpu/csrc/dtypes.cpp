#include "dtypes.h"

#include <utility>

namespace simnpu {
namespace {

using S = c10::ScalarType;

constexpr std::pair<const char*, S> kNames[] = {
    {"bool", S::Bool},
    {"uint8", S::Byte},
    {"int8", S::Char},
    {"int16", S::Short},
    {"int32", S::Int},
    {"int64", S::Long},
    {"uint16", S::UInt16},
    {"uint32", S::UInt32},
    {"uint64", S::UInt64},
    {"float16", S::Half},
    {"bfloat16", S::BFloat16},
    {"float32", S::Float},
    {"float64", S::Double},
    {"complex32", S::ComplexHalf},
    {"complex64", S::ComplexFloat},
    {"complex128", S::ComplexDouble},
    {"float8_e4m3fn", S::Float8_e4m3fn},
    {"float8_e5m2", S::Float8_e5m2},
    {"float8_e4m3fnuz", S::Float8_e4m3fnuz},
    {"float8_e5m2fnuz", S::Float8_e5m2fnuz},
    {"float8_e8m0fnu", S::Float8_e8m0fnu},
    {"float4_e2m1fn_x2", S::Float4_e2m1fn_x2},
};

}  // namespace

std::string dtype_name(S dtype) {
  for (const auto& [name, known] : kNames) {
    if (known == dtype) {
      return name;
    }
  }
  return c10::toString(dtype);
}

S dtype_named(const std::string& name) {
  for (const auto& [known, dtype] : kNames) {
    if (known == name) {
      return dtype;
    }
  }
  return S::Undefined;
}

}  // namespace simnpu
