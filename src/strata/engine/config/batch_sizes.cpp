#include "strata/engine/config/batch_sizes.h"

#include <fmt/format.h>

#include <string>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

std::string size_text(const std::optional<std::int64_t>& v) {
  return v ? fmt::format("{}", *v) : std::string("not given");
}

std::string given_text(const BatchSizes& given, int world_size) {
  return fmt::format(
      "train_batch_size: {}, train_micro_batch_size_per_gpu: {}, gradient_accumulation_steps: {}, "
      "world size: {}",
      size_text(given.train_batch_size), size_text(given.micro_batch_size),
      size_text(given.accumulation_steps), world_size);
}

// The product of the three, or nothing when it is beyond any real batch.
std::optional<std::int64_t> product(std::int64_t micro, std::int64_t steps, std::int64_t world) {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  if (micro > kMost / steps || micro * steps > kMost / world) return std::nullopt;
  return micro * steps * world;
}

}  // namespace

BatchSizes complete_batch_sizes(const BatchSizes& given, int world_size) {
  STRATA_ASSERT(world_size >= 1);
  const auto& [train, micro, steps] = given;
  BatchSizes all = given;
  if (!train && !micro) {
    throw ConfigError(fmt::format(
        "train_batch_size: wanted it or train_micro_batch_size_per_gpu, since accumulation alone "
        "says nothing of the batch; add \"train_micro_batch_size_per_gpu\"; found {}",
        given_text(given, world_size)));
  }
  if (train && micro && !steps) {
    all.accumulation_steps = *train / *micro / world_size;
  } else if (train && !micro) {
    all.accumulation_steps = steps.value_or(1);
    all.micro_batch_size = *train / world_size / *all.accumulation_steps;
  } else if (!train) {
    all.accumulation_steps = steps.value_or(1);
    all.train_batch_size = product(*micro, *all.accumulation_steps, world_size);
  }
  const bool holds =
      all.train_batch_size && *all.micro_batch_size > 0 && *all.accumulation_steps > 0 &&
      product(*all.micro_batch_size, *all.accumulation_steps, world_size) == all.train_batch_size;
  if (!holds) {
    throw ConfigError(
        fmt::format("train_batch_size: does not equal train_micro_batch_size_per_gpu x "
                    "gradient_accumulation_steps x world size: {} != {} x {} x {}; correct one of "
                    "them or remove it and let the others give it; found {}",
                    size_text(all.train_batch_size), *all.micro_batch_size, *all.accumulation_steps,
                    world_size, given_text(given, world_size)));
  }
  return all;
}

}  // namespace strata::engine
