#include "strata/engine/optimize/sharded_optimizer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "strata/engine/optimize/external_optimizer.h"
#include "strata/engine/optimize/native_optimizer.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

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

std::unique_ptr<ShardedOptimizer> make_optimizer(UpdateRule rule, const EngineOptions& options,
                                                 OptimizerShards& shards,
                                                 comm::Collectives& collectives,
                                                 device::Device& device,
                                                 offload::StateStore& states,
                                                 offload::LinkWatch& watch) {
  if (rule == UpdateRule::kNone) return nullptr;
  if (plan::is_external(rule) && options.update_in_backward)
    throw ConfigError(
        "strata.update_at: \"backward\" is for the rules of Strata (Adam, AdamW, Lion), and this "
        "optimizer updates all parameters in its own step(); write \"step\"");
  if (plan::is_external(rule)) {
    auto external = std::make_unique<ExternalOptimizer>(shards, device, watch);
    if (rule != UpdateRule::kExternal)
      external->take_whole(collectives, options.name, rule == UpdateRule::kTogether);
    return external;
  }
  auto native = std::make_unique<NativeOptimizer>(shards, device, states, rule, options, watch);
  const auto is_muon = [&](const Unit& unit) {
    return plan::rule_of(unit.spec.rule, rule) == UpdateRule::kMuon;
  };
  if (std::ranges::any_of(shards.weights().units(), is_muon))
    native->set_muon(std::make_unique<MuonUpdate>(shards, native->states(), states, collectives,
                                                  device, options.name));
  return native;
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
        "this rank has unfrozen parameters (requires_grad, or add_param_group) and another has "
        "not; do it on every rank before the same forward; found here: {}; {}",
        fmt::join(names, ", "), error.what());
  }
  agree_after(collectives, "making room to train parameters that were frozen",
              [&] { make_room(params, weights, reducer, shards, optimizer); });
}

}  // namespace strata::engine
