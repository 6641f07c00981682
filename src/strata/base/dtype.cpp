#include "strata/base/dtype.h"

#include <array>

#include "strata/base/error.h"

namespace strata {
namespace {

struct Entry {
  DType dtype;
  int bytes;
  bool floating;
  std::string_view name;
  std::string_view safetensors;
};

constexpr std::array<Entry, 15> kEntries{{
    {DType::kFloat64, 8, true, "float64", "F64"},
    {DType::kFloat32, 4, true, "float32", "F32"},
    {DType::kFloat16, 2, true, "float16", "F16"},
    {DType::kBFloat16, 2, true, "bfloat16", "BF16"},
    {DType::kFloat8E4M3, 1, false, "float8_e4m3fn", "F8_E4M3"},
    {DType::kFloat8E5M2, 1, false, "float8_e5m2", "F8_E5M2"},
    {DType::kInt64, 8, false, "int64", "I64"},
    {DType::kInt32, 4, false, "int32", "I32"},
    {DType::kInt16, 2, false, "int16", "I16"},
    {DType::kInt8, 1, false, "int8", "I8"},
    {DType::kUInt64, 8, false, "uint64", "U64"},
    {DType::kUInt32, 4, false, "uint32", "U32"},
    {DType::kUInt16, 2, false, "uint16", "U16"},
    {DType::kUInt8, 1, false, "uint8", "U8"},
    {DType::kBool, 1, false, "bool", "BOOL"},
}};

const Entry& entry_of(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  STRATA_ASSERT(index < kEntries.size());
  return kEntries[index];
}

}  // namespace

Bytes size_of(DType dtype) {
  return Bytes(entry_of(dtype).bytes);
}
bool is_floating(DType dtype) {
  return entry_of(dtype).floating;
}
std::string_view name_of(DType dtype) {
  return entry_of(dtype).name;
}
std::string_view safetensors_name_of(DType dtype) {
  return entry_of(dtype).safetensors;
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  for (const Entry& e : kEntries) {
    if (e.safetensors == name) return e.dtype;
  }
  return std::nullopt;
}

std::optional<DType> dtype_from_config(std::string_view name) {
  if (name == "fp32" || name == "float32" || name == "float") return DType::kFloat32;
  if (name == "bf16" || name == "bfloat16") return DType::kBFloat16;
  if (name == "fp16" || name == "float16" || name == "half") return DType::kFloat16;
  return std::nullopt;
}

}  // namespace strata
