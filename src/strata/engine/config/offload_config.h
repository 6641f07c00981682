// Where a configuration places what training keeps: zero_optimization.offload_optimizer and
// offload_param. Plain values. Errors: ConfigError where settings contradict each other.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "strata/base/units.h"
#include "strata/engine/config/placement.h"
#include "strata/io/io_engine.h"
#include "strata/memory/ledger.h"

namespace strata::engine {

class Settings;
struct ConfigFindings;

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

}  // namespace strata::engine
