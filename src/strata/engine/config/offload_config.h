// Where a configuration places what training keeps: zero_optimization.offload_optimizer and
// offload_param, and strata.placement, which places single parameters. A rule of the latter names
// parameters, by a pattern of their names, by their size, or by both, and a place for their
// weights, for their optimizer state, or for both. If several rules name a parameter, the first one
// that names a place counts.
//
// Pure functions of plain values. Errors: ConfigError where settings contradict each other, and for
// rules that say nothing or too much.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "strata/base/units.h"
#include "strata/io/io_engine.h"
#include "strata/memory/ledger.h"
#include "strata/plan/param_spec.h"

namespace strata::engine {

class Settings;
struct ConfigFindings;

struct PlacementRule {
  std::string match = "*";  // of whole names, as shells have it: *, ?, [...]
  Bytes larger_than{-1};    // in the parameter's own dtype
  std::optional<memory::Tier> param;
  std::optional<memory::Tier> optimizer;
};

// One part is read, one is worked on and one is written, each at least as large as what a drive
// moves at full speed.
constexpr Bytes kLeastStaging = 3_MiB;

struct OffloadConfig {
  // The tier of the optimizer's states and fp32 masters. If it is not the device, reduced gradients
  // rest on the host.
  memory::Tier optimizer = memory::Tier::kDevice;
  std::vector<std::string> optimizer_folders;  // on drives
  // Host memory through which states on a drive are staged: buffer_count * buffer_size elements of
  // fp32, at least kLeastStaging.
  Bytes staging;

  // Instead of `staging` and `param_staging`: of both together.
  std::optional<Bytes> staging_in_all;

  double ratio = 1.0;  // of the elements whose states are offloaded

  // The tier of weights that are sharded and not persistent.
  memory::Tier param = memory::Tier::kDevice;
  std::vector<std::string> param_folders;  // on drives
  // To stage weights that lie on a drive, and to keep some: elements of their own dtype.
  Numel param_staging;

  io::EngineOptions io;  // of transfers from and to drives
  bool verify = false;   // checksums of what is read from them

  // Before all of these, for single parameters.
  std::vector<PlacementRule> rules;

  // Instead of all of these: places come from what memory there is (forecast/auto_placement.h).
  // The folders are those that there are, of which each stands for both.
  bool automatic = false;
  bool places_weights = false;  // too
  std::optional<Bytes> device_budget;
  std::optional<Bytes> host_budget;

  // Tiers that rules name for weights, and for states.
  std::vector<memory::Tier> param_tiers() const;
  std::vector<memory::Tier> optimizer_tiers() const;
  bool offloads_params() const;  // or may
};

// `stage` is that of zero_optimization. Values that this stage does not shard stay on the device,
// as under DeepSpeed; settings of their place are hints.
OffloadConfig read_offload(const Settings& settings, int stage, ConfigFindings* remarks);

// Writes ParamSpec::place of each, in their order.
void place_params(std::vector<plan::ParamSpec>& params, const OffloadConfig& offload);

// The parameters that a rule has placed.
struct RuleUse {
  std::string rule;  // "*embed*: weights on the host", as people read it
  std::int64_t params = 0;
  Bytes bytes;  // of the whole parameters, in their own dtype
};

// One for each rule, in their order; also for those that no parameter met.
std::vector<RuleUse> rule_uses(const std::vector<plan::ParamSpec>& params,
                               const OffloadConfig& offload);

}  // namespace strata::engine
