#include "strata/plan/init_plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "strata/base/error.h"
#include "strata/plan/flat_layout.h"

namespace strata::plan {
namespace {

// Left free in every way: the staging of transfers, and what the driver rounds up.
constexpr Bytes kMargin = 128_MiB;

constexpr std::array<std::string_view, 6> kNames = {"auto",        "device_copy", "device_grow",
                                                    "distributed", "host",        "born_flat"};

// How many bytes a rank lacks for a way; 0 or less when it can be taken.
struct Lack {
  Bytes bytes;
  std::string_view where = "device";
  std::size_t rank = 0;
};

Lack lack_of(InitTier tier, const InitDemand& demand, const InitFacts& facts, std::size_t ranks) {
  using enum InitTier;
  const bool beside = tier == kBornFlat || tier == kDeviceCopy;  // the values stay meanwhile
  Bytes needed = demand.total();
  if (!beside) needed = std::max(needed - facts.device_values, Bytes());
  if (tier == kDeviceGrow) needed += demand.largest_unit;
  const Lack device{needed + kMargin - facts.device_free};
  if (beside || tier == kDeviceGrow || device.bytes.value > 0) return device;
  const auto share = static_cast<std::int64_t>(tier == kHost ? 1 : ranks);
  return {facts.device_values / share - facts.host_free, "host"};
}

// Whether it is a way for a model of which values lie where `facts` say.
bool suits(InitTier tier, std::span<const InitFacts> by_rank) {
  const auto any = [&](auto what) { return std::ranges::any_of(by_rank, what); };
  const bool on_device = any([](const InitFacts& f) { return f.device_values.value > 0; });
  const bool on_host = any([](const InitFacts& f) { return f.host_values.value > 0; });
  if (tier == InitTier::kBornFlat) return !on_device && !on_host;
  if (tier == InitTier::kDistributed || tier == InitTier::kHost) return on_device || on_host;
  const bool can_grow = !any([](const InitFacts& f) { return !f.can_grow; });
  return on_device && !on_host && (tier == InitTier::kDeviceCopy || can_grow);
}

Lack worst_of(InitTier tier, const InitDemand& demand, std::span<const InitFacts> by_rank) {
  Lack worst;
  for (std::size_t r = 0; r < by_rank.size(); ++r) {
    const Lack lack = lack_of(tier, demand, by_rank[r], by_rank.size());
    if (r == 0 || lack.bytes > worst.bytes) worst = {lack.bytes, lack.where, r};
  }
  return worst;
}

std::string numbers(const InitDemand& demand, std::span<const InitFacts> by_rank) {
  const auto least = std::ranges::min_element(by_rank, {}, &InitFacts::device_free);
  const InitFacts& facts = *least;
  return fmt::format(
      "the engine needs {} on each device (weights {}, master weights {}, optimizer state {}), "
      "least is free on rank {}: {}; the model's values: {} on the device, {} on the host",
      to_string(demand.total()), to_string(demand.weights), to_string(demand.masters),
      to_string(demand.optimizer), least - by_rank.begin(), to_string(facts.device_free),
      to_string(facts.device_values), to_string(facts.host_values));
}

[[noreturn]] void throw_nothing_fits(InitTier cheapest, const InitDemand& demand,
                                     std::span<const InitFacts> by_rank,
                                     std::span<const InitAlternative> alternatives) {
  const Lack worst = worst_of(cheapest, demand, by_rank);
  std::string fits;
  for (const InitAlternative& other : alternatives) {
    InitDemand smaller;
    smaller.weights = other.total;
    if (worst_of(cheapest, smaller, by_rank).bytes.value > 0) continue;
    fits += fmt::format("{}{} ({})", fits.empty() ? "" : ", ", other.name, to_string(other.total));
  }
  throw OutOfMemoryError(
      "the model does not fit: rank {} lacks {} of {} memory. Nothing has been moved. These would "
      "fit: {}. {}",
      worst.rank, to_string(worst.bytes), worst.where,
      fits.empty() ? std::string("more ranks, or devices with more memory") : fits,
      numbers(demand, by_rank));
}

}  // namespace

std::string_view name_of(InitTier tier) {
  return kNames[static_cast<std::size_t>(tier)];
}

InitDemand init_demand(std::span<const ParamSpec> params, const ModelPlan& plan, int stage,
                       int world_size, const OptimizerNeeds& optimizer, int parts) {
  InitDemand demand;
  for (const UnitSpec& unit : plan.units) {
    const FlatLayout layout(params, unit.params, unit.dtype, world_size);
    const bool whole = stage < 3 || unit.persistent;
    demand.largest_unit = std::max(demand.largest_unit, layout.flat_bytes());
    if (whole || unit.place.weights.value_or(optimizer.weights_tier) == memory::Tier::kDevice)
      demand.weights += whole ? layout.flat_bytes() : layout.shard_bytes() * parts;
    const memory::Tier states = unit.place.states.value_or(optimizer.states_tier);
    if (!unit.trainable || states != memory::Tier::kDevice) continue;
    const MasterForm form = master_form(unit, optimizer.masters);
    const DType dtype = form == MasterForm::kRounded ? optimizer.state_dtype : DType::kFloat32;
    demand.masters += master_bytes(form, layout.shard());
    const auto states_each = std::ssize(states_of(rule_of(unit.rule, optimizer.rule)));
    demand.optimizer += state_bytes(unit.states, dtype, layout.shard()) * states_each;
  }
  return demand;
}

InitChoice choose_init(const InitDemand& demand, std::span<const InitFacts> by_rank,
                       InitTier wanted, std::span<const InitAlternative> alternatives) {
  STRATA_ASSERT(!by_rank.empty());
  if (suits(InitTier::kBornFlat, by_rank)) {
    if (worst_of(InitTier::kBornFlat, demand, by_rank).bytes.value > 0)
      throw_nothing_fits(InitTier::kBornFlat, demand, by_rank, alternatives);
    return {InitTier::kBornFlat, numbers(demand, by_rank)};
  }
  if (wanted != InitTier::kAuto) {
    const bool possible = suits(wanted, by_rank);
    const Lack worst = worst_of(wanted, demand, by_rank);
    if (possible && worst.bytes.value <= 0)
      return {wanted, "as strata.init.tier says; " + numbers(demand, by_rank)};
    throw ConfigError(
        "strata.init.tier: '{}' cannot be taken, {}; write \"auto\". {}", name_of(wanted),
        possible ? fmt::format("rank {} lacks {} of {} memory for it", worst.rank,
                               to_string(worst.bytes), worst.where)
                 : std::string("it is no way for values that lie where this model's do"),
        numbers(demand, by_rank));
  }
  std::string passed;  // over, and why
  InitTier last = InitTier::kDistributed;
  // Without kHost: values that differ are found later; until then sharing the work is better.
  for (const InitTier tier :
       {InitTier::kDeviceCopy, InitTier::kDeviceGrow, InitTier::kDistributed}) {
    if (!suits(tier, by_rank)) continue;
    const Lack worst = worst_of(tier, demand, by_rank);
    if (worst.bytes.value <= 0) return {tier, passed + numbers(demand, by_rank)};
    passed +=
        fmt::format("{} lacks {} on rank {}; ", name_of(tier), to_string(worst.bytes), worst.rank);
    last = tier;
  }
  throw_nothing_fits(last, demand, by_rank, alternatives);
}

}  // namespace strata::plan
