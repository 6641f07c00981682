// The needs of a model's scopes: how much memory at once, and which units in which order. Pure
// functions of the plan.
#pragma once

#include <span>
#include <vector>

#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

// The most memory that the units of one scope take when they are whole.
enum class ScopeUnits { kSharded, kAll };
Bytes largest_scope(std::span<const plan::ScopeSpec> scopes, std::span<const Unit> units,
                    ScopeUnits which);

// The bytes that may be prefetched together despite other bounds: the units of a scope, or none.
Bytes fetched_together(const EngineOptions& options, std::span<const plan::ScopeSpec> scopes,
                       std::span<const Unit> units);

// The bytes of gradients that may be under reduction before the next ones are written:
// EngineOptions::max_reducing. With tiles it is 0, since the device has no room for more than the
// gradient that is being written.
Bytes most_reducing(const EngineOptions& options, std::span<const Unit> units);

// The predicted order of the units' uses in the first pass: forward through the scopes, then
// backward. Both times a scope's units come in their order, and then its tiles one by one,
// backwards the second time.
std::vector<int> expected_uses(std::span<const plan::ScopeSpec> scopes);

}  // namespace strata::engine
