#include "strata/engine/optimize/sharded_optimizer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/optimize/adam_optimizer.h"
#include "strata/engine/optimize/external_optimizer.h"
#include "strata/engine/unit/agreement.h"
#include "strata/offload/host_memory.h"

namespace strata::engine {
namespace {

constexpr Bytes kAlignment = 256_B;  // as memory of a device has

Bytes room_of(const Unit& unit) {
  return align_up(bytes_of(unit.layout.shard(), DType::kFloat32), kAlignment);
}

void make_room(std::span<const int> params, Weights& weights, Reducer& reducer,
               OptimizerShards& shards, ShardedOptimizer* optimizer) {
  weights.back_all();
  std::vector<int> units;
  std::vector<int> added;  // of them, those that were frozen as a whole
  for (const int param : params) {
    Unit& unit = weights.unit_of(param);
    weights.spec_of(param).trainable = true;
    if (!unit.trainable()) {
      unit.spec.trainable = true;
      unit.frozen = unit.spec.params;
      weights.masters().train(unit);
      added.push_back(unit.id);
    }
    std::erase(unit.frozen, param);
    reducer.expect(unit.id, weights.slot_index_of(param));
    if (std::ranges::find(units, unit.id) == units.end()) units.push_back(unit.id);
  }
  for (const int unit : units) {
    shards.add(unit);
    if (optimizer != nullptr) optimizer->add(unit, std::ranges::find(added, unit) != added.end());
  }
}

}  // namespace

OptimizerShards::OptimizerShards(Weights& weights, GradientShards& gradients, int rank)
    : weights_(weights), gradients_(gradients), rank_(rank), index_(weights.units().size(), kNone) {
  for (const Unit& unit : weights.units()) {
    if (unit.trainable()) add(unit.id);
  }
}

void OptimizerShards::add(int unit) {
  std::size_t& index = nth(index_, unit);
  if (index == kNone) {
    index = units_.size();
    units_.push_back({unit, {}});
  }
  units_[index].segments = nth(weights_.units(), unit).layout.segments(rank_, weights_.params());
}

std::vector<int> OptimizerShards::order(std::span<const int> first) const {
  std::vector<int> result(first.begin(), first.end());
  std::vector<bool> listed(units_.size());
  for (const int unit : first) listed[index_of(unit)] = true;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (!listed[i]) result.push_back(units_[i].unit);
  }
  STRATA_ASSERT(result.size() == units_.size());
  return result;
}

// A unit's part ends where the next one's begins.
void run_recorded(ShardedOptimizer& optimizer, StepRecorder& recorder,
                  std::span<const GroupScalars> groups, const GradientScale& scale,
                  std::span<const int> first, const ShardedOptimizer::Updated& updated) {
  StepRecorder::Recording recording = recorder.begin(Activity::kOptimizer, -1);
  optimizer.step(groups, scale, first, [&](int unit) {
    recorder.end(recording, unit);
    updated(unit);
    recording = recorder.begin(Activity::kOptimizer, -1);
  });
}

bool ShardMemory::lacks(const Unit& unit) const {
  return nth(places_, unit.id).values == nullptr && wanted_(unit);
}

std::span<float> ShardMemory::of(const Unit& unit) {
  STRATA_ASSERT(wanted_(unit));
  places_.resize(shards_.weights().units().size());
  Place& place = nth(places_, unit.id);
  if (lacks(unit) && shards_.states_on_host(unit)) take_on_host();
  if (lacks(unit)) {
    place.own = device_.allocate(room_of(unit), kind_);
    place.values = place.own->bytes().data();
  }
  return {reinterpret_cast<float*>(place.values), unit.layout.shard().size()};
}

void ShardMemory::take_on_host() {
  const std::vector<Unit>& units = shards_.weights().units();
  const auto missing = [this](const Unit& unit) {
    return unit.trainable() && shards_.states_on_host(unit) && lacks(unit);
  };
  Bytes all;
  for (const Unit& unit : units) {
    if (missing(unit)) all += room_of(unit);
  }
  host_.push_back(offload::pinned_memory(device_, all, kind_));
  std::byte* next = host_.back()->bytes().data();
  for (const Unit& unit : units) {
    if (!missing(unit)) continue;
    nth(places_, unit.id).values = next;
    next += room_of(unit).size();
  }
}

void ShardMemory::free_on_device() {
  for (Place& place : places_) {
    if (place.own != nullptr) place = {};
  }
}

std::unique_ptr<ShardedOptimizer> make_optimizer(UpdateRule rule, DType moments,
                                                 OptimizerShards& shards, device::Device& device,
                                                 offload::StateStore& states,
                                                 offload::LinkWatch& watch) {
  switch (rule) {
    case UpdateRule::kNone:
      return nullptr;
    case UpdateRule::kAdam:
    case UpdateRule::kAdamW:
      return std::make_unique<AdamOptimizer>(shards, device, states, rule == UpdateRule::kAdamW,
                                             watch, moments);
    case UpdateRule::kExternal:
      return std::make_unique<ExternalOptimizer>(shards, device, watch);
  }
  return nullptr;
}

void train_frozen(std::span<const int> params, Weights& weights, Reducer& reducer,
                  OptimizerShards& shards, ShardedOptimizer* optimizer,
                  comm::Collectives& collectives) {
  std::vector<std::string> names;
  for (const int param : params) {
    const plan::ParamSpec& spec = weights.param(param);
    names.push_back(fmt::format("'{}' in group {}", spec.name, spec.group));
  }
  try {
    agree_on_text(collectives, "list of unfrozen parameter",
                  fmt::format("{}", fmt::join(names, "\n")));
  } catch (const CommError& error) {
    throw CommError(
        fmt::format("this rank has unfrozen parameters (requires_grad, or add_param_group) and "
                    "another has not; "
                    "do it on every rank before the same forward; found here: {}; {}",
                    fmt::join(names, ", "), error.what()));
  }
  agree_after(collectives, "making room to train parameters that were frozen",
              [&] { make_room(params, weights, reducer, shards, optimizer); });
}

}  // namespace strata::engine
