// Batch sizes: train_batch_size = micro-batch x accumulation steps x world size.
// Pure values. Errors: ConfigError with the equation.
#pragma once

#include <cstdint>
#include <optional>

namespace strata::engine {

// As given, absent where it is not; all three are present after complete().
struct BatchSizes {
  std::optional<std::int64_t> train_batch_size;
  std::optional<std::int64_t> micro_batch_size;
  std::optional<std::int64_t> accumulation_steps;

  bool operator==(const BatchSizes&) const = default;
};

// Completes by DeepSpeed's rules: any two give the third; a batch or a micro-batch alone means
// accumulation 1. Sizes that do not divide evenly are refused, never rounded.
BatchSizes complete_batch_sizes(const BatchSizes& given, int world_size);

}  // namespace strata::engine
