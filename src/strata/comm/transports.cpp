#include "strata/comm/transports.h"

#include <array>

#include "strata/base/error.h"

namespace strata::comm {
namespace {

using Control = TransportChoice::Control;

void require_sensible(std::string_view key, TransportKind found, const RankFacts& facts) {
  if (found == TransportKind::kAuto) return;
  if (!facts.on_gpu)
    throw ConfigError(
        "strata.{}: '{}' is for GPUs, and the model trains on {}; leave it out, since "
        "strata.collectives chooses on the host",
        key, name_of(found), facts.device);
  if (found == TransportKind::kNccl && facts.world_size > 1 && !facts.has_nccl)
    throw ConfigError("strata.{}: this build of torch has no NCCL; write 'peer'. Found 'nccl'",
                      key);
  if (facts.group_size != facts.world_size)
    throw ConfigError(
        "strata.{}: for ranks that are one shard group; leave it out, since strata.collectives "
        "chooses for all groups. Found '{}' and groups of {} among {} ranks",
        key, name_of(found), facts.group_size, facts.world_size);
}

void require_joint_gathers(const TransportSettings& settings, const RankFacts& facts) {
  if (!settings.joint_gathers || facts.world_size == 1) return;
  if (settings.gather == TransportKind::kPeer || settings.collectives == CollectivesKind::kPeer)
    throw ConfigError(
        "strata.gather, strata.collectives: 'peer' reads weights in the memory of other GPUs, and "
        "zero_optimization.offload_param keeps them elsewhere; write 'auto'");
  if (facts.group_size != facts.world_size)
    throw ConfigError(
        "zero_optimization.offload_param: weights that are offloaded are sharded over all ranks; "
        "leave out zero_hpz_partition_size and mics_shard_size. Found groups of {} among {} ranks",
        facts.group_size, facts.world_size);
}

std::optional<BulkTransports> choose_bulk(const TransportSettings& settings, const RankSet& ranks,
                                          bool on_gpus) {
  TransportKind both = TransportKind::kNccl;
  if (settings.collectives == CollectivesKind::kPeer) {
    both = TransportKind::kPeer;
  } else if (settings.collectives != CollectivesKind::kNccl) {
    if (!on_gpus) return std::nullopt;
    if (settings.collectives == CollectivesKind::kAuto && ranks.one_host)
      both = TransportKind::kAuto;
  }
  const auto one = [both](TransportKind own) { return own == TransportKind::kAuto ? both : own; };
  return BulkTransports{settings.joint_gathers ? TransportKind::kNccl : one(settings.gather),
                        one(settings.reduce)};
}

TransportChoice choose(const TransportSettings& settings, const RankSet& ranks, bool on_gpus) {
  if (ranks.size == 1) return {};
  const CollectivesKind kind = settings.collectives;
  const bool shares_memory =
      kind == CollectivesKind::kShm || (kind != CollectivesKind::kC10d && ranks.one_host);
  const TransportChoice choice{shares_memory ? Control::kSharedMemory : Control::kBackend,
                               choose_bulk(settings, ranks, on_gpus)};
  if (choice.bulk && choice.bulk->has(TransportKind::kPeer) && !ranks.one_host)
    throw ConfigError(
        "strata.gather, strata.reduce: 'peer' joins ranks of one host, and these are on several; "
        "write 'nccl', or leave both out");
  return choice;
}

}  // namespace

std::string_view name_of(CollectivesKind kind) {
  constexpr std::array<std::string_view, 6> kNames{"auto", "local", "shm", "c10d", "nccl", "peer"};
  return kNames.at(static_cast<std::size_t>(kind));
}

std::string_view name_of(TransportKind kind) {
  constexpr std::array<std::string_view, 3> kNames{"auto", "peer", "nccl"};
  return kNames.at(static_cast<std::size_t>(kind));
}

void require_possible(const TransportSettings& settings, const RankFacts& facts) {
  const CollectivesKind kind = settings.collectives;
  if (kind == CollectivesKind::kLocal && facts.world_size > 1)
    throw ConfigError(
        "strata.collectives: 'local' is for one rank, or for ranks that are threads; found {} "
        "processes. Write 'auto'",
        facts.world_size);
  if (kind == CollectivesKind::kNccl && !facts.on_gpu)
    throw ConfigError(
        "strata.collectives: 'nccl' joins GPUs, and the model trains on {}; write 'auto'",
        facts.device);
  if (facts.world_size > 1 && facts.on_gpu && kind != CollectivesKind::kPeer && !facts.has_nccl)
    throw ConfigError(
        "strata.device: {} ranks on GPUs need NCCL, and this build of torch has none; write 'cpu'",
        facts.world_size);
  require_joint_gathers(settings, facts);
  require_sensible("gather", settings.gather, facts);
  require_sensible("reduce", settings.reduce, facts);
}

TransportChoice choose_inside(const TransportSettings& settings, const RankSet& inside,
                              bool on_gpus) {
  if (settings.collectives == CollectivesKind::kPeer && !inside.one_host)
    throw ConfigError(
        "strata.collectives: 'peer' joins ranks of one host, and these are on several; write "
        "'auto'");
  return choose(settings, inside, on_gpus);
}

TransportChoice choose_across(const TransportSettings& settings, const RankSet& across,
                              bool on_gpus) {
  TransportSettings reaching = settings;
  const bool within_a_host = settings.collectives == CollectivesKind::kShm ||
                             settings.collectives == CollectivesKind::kPeer;
  if (within_a_host && !across.one_host) reaching.collectives = CollectivesKind::kAuto;
  return choose(reaching, across, on_gpus);
}

Traits traits_of(const TransportChoice& choice, int size, bool on_gpus) {
  const auto carried_by = [&](TransportKind kind) {
    return among(kind == TransportKind::kNccl ? kBackendTraits : kPeerTraits, 0, size);
  };
  if (choice.control == Control::kNone)
    return among(on_gpus ? kOneDeviceTraits : kHostMemoryTraits, 0, size);
  if (!choice.bulk)
    return among(choice.control == Control::kBackend ? kBackendTraits : kHostMemoryTraits, 0, size);
  const Traits gathers = carried_by(choice.bulk->gather);
  const Traits reductions = carried_by(choice.bulk->reduce);
  return gathers == reductions ? gathers : split_traits(gathers, reductions);
}

}  // namespace strata::comm
