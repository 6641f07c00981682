// The needs of a model's scopes: how much memory at once, and which units in which order. Pure
// functions of the plan.
#pragma once

#include <span>
#include <vector>

#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

// The most that the units of one scope take when they are whole.
enum class ScopeUnits { kSharded, kAll };
Bytes largest_scope(std::span<const plan::ScopeSpec> scopes, std::span<const Unit> units,
                    ScopeUnits which);

// The bytes that may be prefetched together despite other bounds: the units of a scope, or none.
Bytes fetched_together(const EngineOptions& options, std::span<const plan::ScopeSpec> scopes,
                       std::span<const Unit> units);

// How many bytes of gradients may be under reduction before the next ones are written:
// EngineOptions::max_reducing; where there are tiles none, since the device has no room for more
// than the one that is written.
Bytes most_reducing(const EngineOptions& options, std::span<const Unit> units);

// The units in the order of their uses in a pass, as far as one can tell before the first: forward
// through the scopes, and backward; the units of one come in their order both times, and then its
// tiles one by one, backwards the second time.
std::vector<int> expected_uses(std::span<const plan::ScopeSpec> scopes);

}  // namespace strata::engine
