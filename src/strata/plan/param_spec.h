// A parameter for planning: everything but its values. Immutable value.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/memory/ledger.h"
#include "strata/plan/channel_order.h"

namespace strata::plan {

// The tiers of a parameter's bytes between their uses; absent: those of the job.
struct Placement {
  std::optional<memory::Tier> weights;  // of its shards, where it is sharded
  std::optional<memory::Tier> states;   // of masters and optimizer
  auto operator<=>(const Placement&) const = default;
};

// The parameter that a tile is cut from, by rows (plan/tile_plan.h).
struct TileOf {
  std::string name;                 // of that parameter, as users and checkpoints know it
  std::vector<std::int64_t> shape;  // its own
  Numel first;                      // the tile's first element in it
  int uses = 1;  // modules that use it: a head that is tied to its embedding is two
};

struct ParamSpec {
  std::string name;  // global, as named_parameters() says it; of a tied parameter, the first name
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;  // of the weight that computes
  bool trainable = true;
  int group = 0;  // index of the optimizer's param group; -1: it is in none
  Placement place{};
  std::optional<TileOf> tile{};  // absent: it is a parameter of the user's model
  // Its slot holds [N, C, spatial dimensions] with C innermost: torch.channels_last, or
  // channels_last_3d. Elements of shards count in this order.
  bool channels_last = false;

  // The name and shape that users and checkpoints know, and the first element there.
  const std::string& known_name() const { return tile ? tile->name : name; }
  const std::vector<std::int64_t>& known_shape() const { return tile ? tile->shape : shape; }
  Numel known_first() const { return tile ? tile->first : Numel(); }

  // Whether the slot has another order of elements than files of weights.
  bool reordered() const { return channels_last && orders_differ(shape); }

  // The dtype in which gradients reach the engine, whose kernels do not add up fp64.
  DType gradient_dtype() const { return dtype == DType::kFloat64 ? DType::kFloat32 : dtype; }
  Numel numel() const {
    std::int64_t n = 1;
    for (const std::int64_t d : shape) n *= d;
    return Numel(n);
  }
};

}  // namespace strata::plan
