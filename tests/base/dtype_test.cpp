#include "strata/base/dtype.h"

#include <gtest/gtest.h>

#include <set>

namespace strata {
namespace {

constexpr DType kAll[] = {DType::kFloat64,    DType::kFloat32,    DType::kFloat16, DType::kBFloat16,
                          DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt64,   DType::kInt32,
                          DType::kInt16,      DType::kInt8,       DType::kUInt64,  DType::kUInt32,
                          DType::kUInt16,     DType::kUInt8,      DType::kBool};

TEST(DTypeNames, EveryTypeComesBackFromItsSafetensorsName) {
  std::set<std::string_view> names;
  for (const DType dtype : kAll) {
    EXPECT_EQ(dtype_from_safetensors(safetensors_name_of(dtype)), dtype) << name_of(dtype);
    names.insert(safetensors_name_of(dtype));
    names.insert(name_of(dtype));
  }
  EXPECT_EQ(names.size(), 2 * std::size(kAll));
}

TEST(DTypeNames, UnknownNamesGiveNothing) {
  EXPECT_EQ(dtype_from_safetensors("bf16"), std::nullopt);
  EXPECT_EQ(dtype_from_safetensors(""), std::nullopt);
  EXPECT_EQ(dtype_from_config("fp17"), std::nullopt);
}

TEST(DTypeNames, ConfigsMayUseShortAndLongNames) {
  for (const char* name : {"fp32", "float32"}) EXPECT_EQ(dtype_from_config(name), DType::kFloat32);
  for (const char* name : {"bf16", "bfloat16"}) {
    EXPECT_EQ(dtype_from_config(name), DType::kBFloat16);
  }
  for (const char* name : {"fp16", "float16", "half"}) {
    EXPECT_EQ(dtype_from_config(name), DType::kFloat16);
  }
}

TEST(DTypeSizes, BytesOfMultipliesTheElementSize) {
  EXPECT_EQ(bytes_of(Numel(3), DType::kFloat64), 24_B);
  EXPECT_EQ(bytes_of(Numel(3), DType::kBFloat16), 6_B);
  EXPECT_EQ(bytes_of(Numel(3), DType::kFloat8E4M3), 3_B);
  EXPECT_EQ(bytes_of(Numel(0), DType::kInt64), 0_B);
}

TEST(DTypeKinds, MasterWeightsMayBeOfFourFloatingTypes) {
  std::set<DType> floating;
  for (const DType dtype : kAll) {
    if (is_floating(dtype)) floating.insert(dtype);
  }
  EXPECT_EQ(floating,
            (std::set{DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}));
}

}  // namespace
}  // namespace strata
