// A parameter for planning: everything but its values; and the two orders in which its elements may
// lie. Immutable values, pure functions. Threads: any. Errors: none.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/memory/ledger.h"

namespace strata::plan {

// The two orders of the elements of a convolution's weight [N, C, spatial dimensions]: that of its
// dimensions, and channels_last, in which C is the innermost. Files of weights have the first;
// the slot of a parameter with ParamSpec::channels_last has the second. Whether the two differ for
// a tensor of this shape.
bool orders_differ(std::span<const std::int64_t> shape);

// Brings a whole tensor to the one order or the other, in place. `element`: 1, 2, 4 or 8.
void reorder(std::span<std::byte> values, std::span<const std::int64_t> shape, Bytes element,
             bool channels_last);

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
