#include "strata/forecast/job_traits.h"

#include <fmt/core.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/comm/transports.h"

namespace strata::forecast {

int ranks_of_a_host(const Job& job) {
  return job.ranks_per_host == 0 ? job.world_size : std::min(job.ranks_per_host, job.world_size);
}

comm::Traits traits_of_job(const engine::Config& config, const Job& job) {
  if (job.world_size < 1 || job.ranks_per_host < 0) {
    throw UsageError(fmt::format("a job has at least one rank, and one a host; found {} and {}",
                                 job.world_size, job.ranks_per_host));
  }
  const int host = job.ranks_per_host == 0 ? job.world_size : job.ranks_per_host;
  const bool one_host = job.world_size <= host;
  const int size = config.shard_group_size(job.world_size);
  const int groups = job.world_size / size;
  const comm::TransportSettings settings = config.strata.transports;
  comm::Traits inside =
      traits_of(choose_inside(settings, {size, one_host || host % size == 0}, job.on_gpus), size,
                job.on_gpus);
  if (settings.joint_gathers && size > 1) inside.one_sided = false;
  if (groups == 1) return inside;
  const comm::Traits across =
      traits_of(choose_across(settings, {groups, one_host}, job.on_gpus), groups, job.on_gpus);
  return grouped_traits(inside, across, config.slices());
}

}  // namespace strata::forecast
