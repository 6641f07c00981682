// What carries the bytes of a job that does not run, as it would be chosen when it ran
// (python/strata/carriers.py, rank_environment.h): of the configuration, the devices, and which
// ranks share a host. A probe, which compares carriers by their speed, is taken to leave "auto" as
// it is. Threads: any. Errors: UsageError for a number of ranks that is none; ConfigError where
// shard groups do not come out even, or "peer" would have to reach another host.
#pragma once

#include "strata/engine/config/config.h"
#include "strata/forecast/dry_collectives.h"

namespace strata::torch {

enum class JobDevice { kCpu, kCuda };

struct Job {
  int world_size = 1;
  JobDevice device = JobDevice::kCuda;
  int ranks_per_host = 0;  // consecutive ones; 0: all ranks are on one host
};

forecast::Carriers carriers_of_job(const engine::Config& config, const Job& job);

}  // namespace strata::torch
