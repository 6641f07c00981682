#include "strata/torch/base/dtype.h"

#include <array>
#include <utility>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

using c10::ScalarType;

constexpr std::array<std::pair<DType, ScalarType>, 15> kPairs{{
    {DType::kFloat64, ScalarType::Double},
    {DType::kFloat32, ScalarType::Float},
    {DType::kFloat16, ScalarType::Half},
    {DType::kBFloat16, ScalarType::BFloat16},
    {DType::kFloat8E4M3, ScalarType::Float8_e4m3fn},
    {DType::kFloat8E5M2, ScalarType::Float8_e5m2},
    {DType::kInt64, ScalarType::Long},
    {DType::kInt32, ScalarType::Int},
    {DType::kInt16, ScalarType::Short},
    {DType::kInt8, ScalarType::Char},
    {DType::kUInt64, ScalarType::UInt64},
    {DType::kUInt32, ScalarType::UInt32},
    {DType::kUInt16, ScalarType::UInt16},
    {DType::kUInt8, ScalarType::Byte},
    {DType::kBool, ScalarType::Bool},
}};

}  // namespace

DType from_scalar_type(c10::ScalarType type) {
  for (const auto& [dtype, scalar] : kPairs) {
    if (scalar == type) return dtype;
  }
  throw UsageError(fmt::format("parameters of dtype {} cannot be sharded; convert them first",
                               c10::toString(type)));
}

c10::ScalarType to_scalar_type(DType dtype) {
  for (const auto& [own, scalar] : kPairs) {
    if (own == dtype) return scalar;
  }
  STRATA_ASSERT(false);
  return ScalarType::Undefined;
}

}  // namespace strata::torch
