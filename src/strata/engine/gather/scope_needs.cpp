#include "strata/engine/gather/scope_needs.h"

#include <algorithm>

#include "strata/memory/host_buffer.h"

namespace strata::engine {

Bytes largest_scope(std::span<const plan::ScopeSpec> scopes, std::span<const Unit> units,
                    ScopeUnits which) {
  Bytes largest;
  for (const plan::ScopeSpec& scope : scopes) {
    Bytes bytes;
    for (const int index : scope.units) {
      const Unit& unit = units[static_cast<std::size_t>(index)];
      if (which == ScopeUnits::kAll || !unit.whole)
        bytes += align_up(unit.layout.flat_bytes(), memory::page_size());
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

Bytes fetched_together(const EngineOptions& options, std::span<const plan::ScopeSpec> scopes,
                       std::span<const Unit> units) {
  return options.fetches_scopes ? largest_scope(scopes, units, ScopeUnits::kSharded) : Bytes();
}

Bytes most_reducing(const EngineOptions& options, std::span<const Unit> units) {
  const bool tiles = std::ranges::any_of(units, [](const Unit& unit) { return unit.spec.tile(); });
  return tiles ? Bytes() : options.max_reducing;
}

std::vector<int> expected_uses(std::span<const plan::ScopeSpec> scopes) {
  std::vector<int> uses;
  for (const plan::ScopeSpec& scope : scopes) {
    uses.insert(uses.end(), scope.units.begin(), scope.units.end());
    uses.insert(uses.end(), scope.tiles.begin(), scope.tiles.end());
  }
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
    uses.insert(uses.end(), scope->units.begin(), scope->units.end());
    uses.insert(uses.end(), scope->tiles.rbegin(), scope->tiles.rend());
  }
  return uses;
}

}  // namespace strata::engine
