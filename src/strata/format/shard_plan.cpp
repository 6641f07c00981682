#include "strata/format/shard_plan.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/format/message_text.h"

namespace strata::format {
namespace {

Bytes bytes_of_spec(const TensorSpec& tensor) {
  const auto numel = checked_numel(tensor.shape);
  const auto bytes = numel ? checked_bytes(*numel, tensor.dtype) : std::nullopt;
  if (!bytes) {
    throw UsageError(
        fmt::format("a tensor's size does not fit 63 bits or is negative: tensor={} shape={}",
                    in_quotes(tensor.name), shape_text(tensor.shape)));
  }
  return *bytes;
}

// Cuts a prefix off; false if it is not there.
bool take(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return false;
  text.remove_prefix(prefix.size());
  return true;
}

bool take_number(std::string_view& text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  text.remove_prefix(digits);
  return digits >= 5;
}

}  // namespace

ShardPlan plan_shards(std::span<const TensorSpec> tensors, Bytes shard_max) {
  if (shard_max.value < 1) {
    throw UsageError(
        fmt::format("the largest size of a shard must be positive: found={}", shard_max.value));
  }
  ShardPlan plan;
  plan.tensors.emplace_back();
  Bytes filled;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Bytes bytes = bytes_of_spec(tensors[i]);
    if (!plan.tensors.back().empty() && bytes > shard_max - filled) {
      plan.tensors.emplace_back();
      filled = Bytes(0);
    }
    plan.tensors.back().push_back(i);
    filled += bytes;
    if (__builtin_add_overflow(plan.total.value, bytes.value, &plan.total.value)) {
      throw UsageError("the tensors' bytes together do not fit 63 bits");
    }
  }
  const std::size_t count = plan.tensors.size();
  for (std::size_t i = 0; i < count; ++i) {
    plan.files.push_back(count == 1
                             ? std::string(kSingleFileName)
                             : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count));
  }
  return plan;
}

bool is_shard_name(std::string_view file_name) {
  const bool pickle = take(file_name, "pytorch_");
  return take(file_name, "model-") && take_number(file_name) && take(file_name, "-of-") &&
         take_number(file_name) && file_name == (pickle ? ".bin" : ".safetensors");
}

}  // namespace strata::format
