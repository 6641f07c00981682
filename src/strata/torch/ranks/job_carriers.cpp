#include "strata/torch/ranks/job_carriers.h"

#include <fmt/format.h>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

using engine::CarrierKind;
using engine::CollectivesKind;

comm::ShardPlace place_in_groups(const engine::Config& config, int world_size) {
  const int size = config.shard_group_size(world_size);
  const int groups = world_size / size;
  if (groups > 1 && config.zero.secondary_shards) return {0, world_size, 0, 1, groups};
  return {0, size, 0, groups, 1};
}

// What collectives of one kind are, alone. Each answers for itself when a job runs.
constexpr forecast::Carriers kMemoryOfTheHost{};
constexpr forecast::Carriers kProcessGroup{
    .one_sided = false, .deterministic = false, .sums_in_fp32 = false};
constexpr forecast::Carriers kPeers{
    .gathers_on_device = true, .has_contribution_stream = true, .has_inbox = true};

forecast::Carriers split(const forecast::Carriers& gathers, const forecast::Carriers& reductions) {
  forecast::Carriers carriers = gathers;
  carriers.deterministic = reductions.deterministic;
  carriers.sums_in_fp32 = reductions.sums_in_fp32;
  carriers.gathers_on_device = gathers.gathers_on_device || reductions.gathers_on_device;
  carriers.has_contribution_stream = reductions.has_contribution_stream;
  carriers.has_inbox = false;
  return carriers;
}

forecast::Carriers grouped(const forecast::Carriers& inside, const forecast::Carriers& across) {
  return {.one_sided = inside.one_sided,
          .deterministic = inside.deterministic && across.deterministic,
          .sums_in_fp32 = inside.sums_in_fp32};
}

// Of `size` ranks.
forecast::Carriers among(const engine::StrataConfig& config, CollectivesKind kind, JobDevice device,
                         int size, bool one_host) {
  const bool on_gpus = device == JobDevice::kCuda;
  if (size == 1) return {.one_sided = !on_gpus};
  const bool wants_peers = kind == CollectivesKind::kPeer || config.gather == CarrierKind::kPeer ||
                           config.reduce == CarrierKind::kPeer;
  if (wants_peers && !one_host) {
    throw ConfigError(
        "strata.collectives, strata.gather, strata.reduce: 'peer' joins ranks of one host, and "
        "these are on several; write 'auto'");
  }
  if (kind == CollectivesKind::kPeer && !on_gpus) return kPeers;
  if (!on_gpus)
    return kind != CollectivesKind::kC10d && one_host ? kMemoryOfTheHost : kProcessGroup;
  const bool reached =
      kind == CollectivesKind::kPeer || (kind == CollectivesKind::kAuto && one_host);
  const auto by_peers = [&](CarrierKind own) {
    return own == CarrierKind::kPeer || (own == CarrierKind::kAuto && reached);
  };
  const forecast::Carriers& gathers = by_peers(config.gather) ? kPeers : kProcessGroup;
  const forecast::Carriers& reductions = by_peers(config.reduce) ? kPeers : kProcessGroup;
  return &gathers == &reductions ? gathers : split(gathers, reductions);
}

}  // namespace

forecast::Carriers carriers_of_job(const engine::Config& config, const Job& job) {
  if (job.world_size < 1 || job.ranks_per_host < 0) {
    throw UsageError(fmt::format("a job has at least one rank, and one a host; found {} and {}",
                                 job.world_size, job.ranks_per_host));
  }
  const int host = job.ranks_per_host == 0 ? job.world_size : job.ranks_per_host;
  const bool one_host = job.world_size <= host;
  const CollectivesKind kind = config.strata.collectives;
  const int size = config.shard_group_size(job.world_size);
  const bool groups_within_hosts = one_host || host % size == 0;
  forecast::Carriers carriers = among(config.strata, kind, job.device, size, groups_within_hosts);
  if (size < job.world_size) {
    const bool only_inside = kind == CollectivesKind::kShm || kind == CollectivesKind::kPeer;
    carriers = grouped(
        carriers, among(config.strata, only_inside && !one_host ? CollectivesKind::kAuto : kind,
                        job.device, job.world_size / size, one_host));
  }
  carriers.world_size = job.world_size;
  carriers.place = place_in_groups(config, job.world_size);
  return carriers;
}

}  // namespace strata::torch
