// Cuts a model into units (parameters that are gathered, reduced and updated together) and scopes
// (the modules whose forward needs them). A block's parameters form one unit, split by dtype,
// trainability, persistence, placement, update rule and form of states, and by size: gradients of a
// part can be reduced while those of the next are computed, and buffers are smaller. Parameters
// outside blocks form units of neighbours up to `unit_bytes`, with their owning modules as scopes;
// modules share such a unit only up to `shared_numel`, so that a bound on what is gathered holds
// for models without blocks, too.
//
// One by one (`one_by_one`), a parameter is a unit by itself, and scopes are the innermost modules
// that own parameters and are called. This gathers the least at once, in more gathers. Small
// parameters of neighbours within a block still share units, up to `shared_numel`, and so do
// persistent ones. A module that is named in `wrap` or is a leaf is one scope with all that it
// contains (such as experts of which each batch uses others, if a gather needs every rank).
//
// A tile of a parameter (plan/tile_plan.h) is always a unit by itself. Its scopes do not hold it:
// the code that walks over the tiles gathers one after the other.
//
// A tied parameter belongs to the first unit with a module that uses it; every scope that reaches
// it lists that unit. Pure function; the same model gives the same plan on every rank.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/plan/block_search.h"
#include "strata/plan/param_spec.h"

namespace strata::plan {

struct UnitSpec {
  std::string name;  // of the block or first owner; with a suffix where that has several units
  std::vector<int> params;  // indices into the model's parameters, in flat order
  DType dtype = DType::kFloat32;
  bool trainable = true;
  bool persistent = false;  // small parameters that stay gathered
  Placement place{};        // of all of them
  std::optional<UpdateRule> rule{};
  StateForm states = StateForm::kNumbers;
  // For a tile, the number of modules that use it: each may bring a gradient in a pass. Else 0.
  int tile_uses = 0;
  bool tile() const { return tile_uses > 0; }
};

struct ScopeSpec {
  int module = 0;            // index into the module tree
  std::vector<int> units;    // that its forward needs, ascending
  std::vector<int> tiles{};  // that it needs one after the other, in order
};

struct ModelPlan {
  std::vector<UnitSpec> units;
  std::vector<ScopeSpec> scopes;
  std::vector<int> unit_of_param;
};

inline constexpr Numel kUnbounded(std::numeric_limits<std::int64_t>::max());

struct PlanOptions {
  std::vector<std::string> wrap;     // class names of blocks; empty: found by themselves
  LeafModules leaves;                // blocks where they lie in no other
  Bytes unit_bytes = 32_MiB;         // bound for units of neighbours outside blocks
  Bytes block_unit_bytes = 256_MiB;  // and for those of a block; a parameter is never cut
  Numel shared_numel = kUnbounded;   // of a unit that several modules outside blocks use
  bool one_by_one = false;           // units of one parameter
  Bytes small_bytes = 64_KiB;        // then: a parameter that takes more is a unit by itself
  Numel persistence_threshold;       // smaller or equal parameters stay gathered; 0: none
  Numel persistence_total;           // the most elements of them altogether; 0: no bound
};

ModelPlan plan_units(std::span<const ParamSpec> params, const ModuleTree& tree,
                     const PlanOptions& options);

// Gives 8 bits to the states of the trainable parameters that have at least `least` elements,
// whatever part of them a rank or a tile has, and are in no embedding, where 8 bits are unstable:
// a module is one by its class's name, or by its own where files tell no class.
void take_8_bits(std::span<ParamSpec> params, const ModuleTree& tree, std::int64_t least);

// Gives Muon's rule to the trainable matrices that are in no embedding and in no layer that ends a
// model, by names and shapes, as where files tell no class.
void take_muon(std::span<ParamSpec> params, const ModuleTree& tree);

// Canonical text of a model and its plan, a line a parameter, for comparing ranks.
std::string describe(std::span<const ParamSpec> params, const ModelPlan& plan);

// The form in which the fp32 master weights of a unit's shard are kept. Pure arithmetic.

enum class MasterForm {
  kNone,       // frozen: never updated
  kShard,      // the weights are fp32 and their own masters
  kFloat32,    // fp32 beside the weights
  kRemainder,  // the bits that bf16 weights lack: kernels/master_remainder.h
  kRounded,    // none: bf16 weights are updated in fp32 and rounded at each step
};

// The values that the optimizer updates if weights are bf16.
enum class Masters { kFloat32, kRemainder, kRounded };

inline MasterForm master_form(const UnitSpec& unit, Masters of_bf16) {
  if (!unit.trainable) return MasterForm::kNone;
  if (unit.dtype == DType::kFloat32) return MasterForm::kShard;
  if (unit.dtype != DType::kBFloat16 || of_bf16 == Masters::kFloat32) return MasterForm::kFloat32;
  return of_bf16 == Masters::kRemainder ? MasterForm::kRemainder : MasterForm::kRounded;
}

// The bytes of one state of a shard of `numel`; `dtype`: of numbers.
inline Bytes state_bytes(StateForm form, DType dtype, Numel numel) {
  if (form == StateForm::kNumbers) return bytes_of(numel, dtype);
  return Bytes(numel.value) +
         bytes_of(Numel((numel.value + kBlock8 - 1) / kBlock8), DType::kFloat32);
}

// The bytes that masters of this form take beside the weights, for a shard of `numel`.
inline Bytes master_bytes(MasterForm form, Numel numel) {
  switch (form) {
    case MasterForm::kNone:
    case MasterForm::kShard:
    case MasterForm::kRounded:
      return Bytes();
    case MasterForm::kFloat32:
      return bytes_of(numel, DType::kFloat32);
    case MasterForm::kRemainder:
      return align_up(Bytes(2 * numel.value), 64_B) + align_up(Bytes((numel.value + 7) / 8), 64_B);
  }
  return Bytes();
}

}  // namespace strata::plan
