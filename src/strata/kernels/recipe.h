// Recipes: what constructors did to a parameter that has no memory yet, as a list of operations
// that work element by element. Any range of its elements can be made from that, by itself and in
// any order: random numbers are counted by element (Philox4x32-10, Salmon et al., "Parallel Random
// Numbers: As Easy as 1, 2, 3", 2011), so values depend neither on pieces nor on ranks. All is
// computed in fp32 and rounded once. Every machine gives the same bits: logarithms, sines and the
// like are ours, with fused multiply-adds where the code spells them out.
// Threads: pure functions of their arrays; work is split over `pool` when one is given.
// Errors: UsageError for an element type other than fp32, bf16 and fp16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

enum class RecipeOp : std::uint8_t {
  kFill,      // a
  kUniform,   // [a, b), by `key`
  kNormal,    // mean a, standard deviation b, by `key`
  kAdd,       // a
  kMultiply,  // by a
  kDivide,    // by a
  kClamp,     // to [a, b]
  kErfinv,    // the inverse of the error function
};

// Some of a parameter's elements, in the order of memory: `rows` runs of `length` elements, one
// every `stride` elements, the first at `begin`. Runs do not overlap.
struct Region {
  Numel begin;
  Numel length;
  Numel stride;
  std::int64_t rows = 1;
};

// One operation on the elements of its region.
struct RecipeStep {
  RecipeOp op = RecipeOp::kFill;
  float a = 0.0F;
  float b = 0.0F;
  std::uint64_t key = 0;  // of the random numbers of this step, unlike any other's
  Region region;
};

// From zeroes on.
using Recipe = std::vector<RecipeStep>;

// target = elements [begin, begin + numel) of the parameter; of `dtype`.
void replay(std::span<const RecipeStep> recipe, Numel begin, Numel numel, std::byte* target,
            DType dtype, ThreadPool* pool);

}  // namespace strata::kernels
