// What the collectives of a job that does not run would promise: those that would carry its bytes
// (comm/carriers.h). A probe, which compares carriers by their speed, is taken to leave "auto" as
// it is. Threads: any. Errors: UsageError for a number of ranks that is none; ConfigError where
// shard groups do not come out even, or "peer" would have to reach another host.
#pragma once

#include "strata/comm/traits.h"
#include "strata/engine/config/config.h"

namespace strata::forecast {

struct Job {
  int world_size = 1;
  bool on_gpus = true;
  int ranks_per_host = 0;  // consecutive ones; 0: all ranks are on one host
};

// That share a host's memory and drives.
int ranks_of_a_host(const Job& job);

comm::Traits traits_of_job(const engine::Config& config, const Job& job);

}  // namespace strata::forecast
