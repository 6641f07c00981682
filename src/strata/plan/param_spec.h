// A parameter for planning: everything but its values; the two orders in which its elements may
// lie; and tiles, into which it is cut by rows. Immutable values, pure functions. Threads: any.
// Errors: ConfigError of tiles, with the name and the numbers.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/memory/ledger.h"
#include "strata/plan/update_rule.h"

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

// The parameter that a tile is cut from, by rows.
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
  StateForm states = StateForm::kNumbers;
  std::optional<UpdateRule> rule{};  // absent: that of the job's optimizer
  std::optional<TileOf> tile{};      // absent: it is a parameter of the user's model
  // Its slot holds [N, C, spatial dimensions] with C innermost: torch.channels_last, or
  // channels_last_3d. Elements of shards count in this order.
  bool channels_last = false;
  // Under kMuon: whether each element of the first dimension has matrices of its own, and what all
  // cost to orthogonalize, in any unit; 0: as many as elements.
  bool matrices_apart = false;
  double matrix_cost = 0.0;

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

// Rows of one parameter that are gathered, used and reduced on their own, if the whole parameter is
// larger than one gather may be. A row is one element of the first dimension: an output of a linear
// layer, a token of an embedding, an expert of a fused weight.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  auto operator<=>(const RowRange&) const = default;
};

// Cuts `rows` rows of `row` bytes each into the fewest tiles of at most `most` bytes, all of one
// size except the last, so that one tile's memory serves the next. `name`: the parameter's. Errors:
// a row exceeds `most`.
std::vector<RowRange> cut_rows(std::string_view name, std::int64_t rows, Bytes row, Bytes most);

// Checks tiles that the caller has cut. Throws unless they hold every row once, in order, none is
// empty, and none exceeds `most`.
void require_tiles(std::string_view name, std::int64_t rows, Bytes row, Bytes most,
                   std::span<const RowRange> tiles);

// Whether the settings cut this parameter into tiles: it exceeds `most`, and one of the patterns
// names it (as a shell's do), or there are no patterns.
bool wants_tiles(const std::string& name, Bytes bytes, Bytes most,
                 std::span<const std::string> patterns);

}  // namespace strata::plan
