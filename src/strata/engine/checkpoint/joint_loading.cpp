#include "strata/engine/checkpoint/joint_loading.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <string_view>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

constexpr std::string_view kReading = "reading the weights";
constexpr std::int64_t kSyncPoints = 8;  // each costs the skew between ranks

// Whole units of which the map has every parameter, by the places at which they end.
std::vector<std::pair<format::FileOffset, int>> whole_units_by_end(const Weights& weights,
                                                                   const format::WeightMap& map,
                                                                   std::span<const int> params) {
  std::vector<std::size_t> missing;
  std::vector<std::pair<format::FileOffset, int>> ends;
  for (const Unit& unit : weights.units()) {
    missing.push_back(unit.spec.params.size());
    ends.emplace_back(format::FileOffset{}, unit.id);
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i] < 0 || params[i] >= weights.param_count()) continue;  // load_weights() tells
    const auto unit = static_cast<std::size_t>(weights.unit_of(params[i]).id);
    --missing[unit];
    ends[unit].first = std::max(ends[unit].first, map.end_of(i));
  }
  std::erase_if(ends, [&](const auto& end) {
    const auto unit = static_cast<std::size_t>(end.second);
    return missing[unit] > 0 || !weights.units()[unit].whole;
  });
  std::ranges::sort(ends);
  return ends;
}

Bytes whole_bytes(const Weights& weights) {
  Bytes bytes;
  for (const Unit& unit : weights.units()) bytes += Bytes(unit.resident.size());
  return bytes;
}

LoadedBytes load_with_sync_points(Engine& engine, const LoadSource& source, Bytes enough,
                                  const std::function<void()>& sync) {
  const comm::ShardPosition place = engine.collectives().shard_position();
  std::vector<GatherPoint> points;
  if (place.held_count() > 1 && place.parts == 1)
    points = plan_gather_points(engine.weights(), source.map, source.params, enough);
  checkpoint::SyncPoints sync_points;
  // Peers map this memory at once, and their driver lets no first copy begin meanwhile: ranks that
  // have copied something go on beside it.
  if (!points.empty()) sync_points.begun = [&engine] { engine.weights().back_all(); };
  for (const GatherPoint& point : points) sync_points.places.push_back(point.place);
  sync_points.reached = [&](std::size_t i) {
    sync();
    engine.gather_early(points[i].units);
  };
  return load_weights(engine, source, &sync_points);
}

}  // namespace

std::vector<GatherPoint> plan_gather_points(const Weights& weights, const format::WeightMap& map,
                                            std::span<const int> params, Bytes enough) {
  const auto bytes_of_unit = [&](int unit) {
    return Bytes(weights.units()[static_cast<std::size_t>(unit)].resident.size());
  };
  std::vector<GatherPoint> points;
  Bytes since = enough;
  for (const auto& [place, unit] : whole_units_by_end(weights, map, params)) {
    if (since >= enough) {
      points.emplace_back();
      since = Bytes();
    }
    points.back().place = place;
    points.back().units.push_back(unit);
    since += bytes_of_unit(unit);
  }
  if (!points.empty()) points.pop_back();
  return points;
}

LoadedBytes load_weights_together(Engine& engine, const LoadSource& source,
                                  std::optional<Bytes> enough) {
  comm::Collectives& collectives = engine.collectives();
  engine.state_offload().require_all("loading weights");
  // No rank stores before all ranks have released their gathered units.
  agree_after(collectives, kReading, [&] { engine.gatherer().invalidate(Changed::kAll); });
  bool agreeing = false;  // what is thrown meanwhile is thrown on every rank
  const auto sync = [&](const Failure& mine) {
    agreeing = true;
    agree_on_outcome(collectives, kReading, mine);
    agreeing = false;
  };
  LoadedBytes loaded;
  try {
    Failure mine;
    try {
      if (!enough) enough = std::max(1_B, whole_bytes(engine.weights()) / kSyncPoints);
      loaded = load_with_sync_points(engine, source, *enough, [&] { sync({}); });
    } catch (const CommError&) {
      throw;  // the others know already
    } catch (...) {
      if (agreeing) throw;
      mine = failure_of(std::current_exception());
    }
    sync(mine);
  } catch (const CommError&) {
    throw;
  } catch (...) {
    engine.gatherer().abandon_lazy_gather();
    throw;
  }
  return loaded;
}

}  // namespace strata::engine
