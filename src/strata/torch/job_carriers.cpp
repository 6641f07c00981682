#include "strata/torch/job_carriers.h"

#include <fmt/format.h>

#include <utility>

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
forecast::Carriers memory_of_the_host() {
  return {};
}

forecast::Carriers process_group() {
  forecast::Carriers carriers;
  carriers.one_sided = false;
  carriers.deterministic = false;
  carriers.sums_in_fp32 = false;
  return carriers;
}

forecast::Carriers peers() {
  forecast::Carriers carriers;
  carriers.gathers_on_device = true;
  carriers.has_contribution_stream = true;
  carriers.has_inbox = true;
  return carriers;
}

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
  forecast::Carriers carriers;
  carriers.one_sided = inside.one_sided;
  carriers.deterministic = inside.deterministic && across.deterministic;
  carriers.sums_in_fp32 = inside.sums_in_fp32;
  return carriers;
}

forecast::Carriers alone(JobDevice device) {
  forecast::Carriers carriers;
  carriers.one_sided = device == JobDevice::kCpu;
  return carriers;
}

// Of `size` ranks.
forecast::Carriers among(const engine::StrataConfig& config, CollectivesKind kind, JobDevice device,
                         int size, bool one_host) {
  if (size == 1) return alone(device);
  if (kind == CollectivesKind::kPeer && !one_host) {
    throw ConfigError(
        "strata.collectives: 'peer' joins ranks of one host, and these are on several; write "
        "'auto'");
  }
  if (kind == CollectivesKind::kPeer && device == JobDevice::kCpu) return peers();
  if (device == JobDevice::kCpu) {
    const bool shared = kind != CollectivesKind::kC10d && one_host;
    return shared ? memory_of_the_host() : process_group();
  }
  const bool reached =
      kind == CollectivesKind::kPeer || (kind == CollectivesKind::kAuto && one_host);
  const auto of = [&](CarrierKind own) {
    const bool by_peers = own == CarrierKind::kPeer || (own == CarrierKind::kAuto && reached);
    return std::pair(by_peers, by_peers ? peers() : process_group());
  };
  const auto [peers_gather, gathers] = of(config.gather);
  const auto [peers_reduce, reductions] = of(config.reduce);
  return peers_gather == peers_reduce ? gathers : split(gathers, reductions);
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
