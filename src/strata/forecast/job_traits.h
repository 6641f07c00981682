// The traits of the collectives that would carry the bytes of a job that does not run
// (comm/transports.h). The functions assume that a probe of the transports' speeds would not change
// "auto". Threads: any. Errors: UsageError for an invalid number of ranks; ConfigError if shard
// groups are uneven, or if "peer" would have to reach another host.
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
