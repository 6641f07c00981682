// Loading a checkpoint on all ranks at once. Units that stay whole are gathered while the files are
// still read: a few places of the files, the same on every rank, are sync points. There the ranks
// begin to gather the units that all of them have read their parts of, over the link between
// devices, which reading leaves idle. Collective; outcomes are agreed on (engine/unit/agreement.h).
// Threads: the engine's. Errors: those of load_weights(), on every rank, of the first rank that had
// one; UsageError where a rank has a sharded unit in use: nothing is stored then; CommError.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "strata/engine/checkpoint/weight_loader.h"

namespace strata::engine {

// A sync point, and the units that lie in the files before it and not before the one before.
struct GatherPoint {
  format::FileOffset place;
  std::vector<int> units;
};

// In the order of places, of at least `enough` bytes of whole units each. Units of which the map
// does not have every parameter are in none, nor are the last ones: nothing would be read beside
// them. Pure, the same on every rank.
std::vector<GatherPoint> plan_gather_points(const Weights& weights, const format::WeightMap& map,
                                            std::span<const int> params, Bytes enough);

// Follow with Engine::weights_changed(), which gathers the rest; until then no rank stores to
// the map's parameters. `enough`: of plan_gather_points(); nullopt: an eighth of the model.
LoadedBytes load_weights_together(Engine& engine, const LoadSource& source,
                                  std::optional<Bytes> enough = std::nullopt);

}  // namespace strata::engine
