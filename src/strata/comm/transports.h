// The transports of a job's small messages, its weights and its gradients: one decision, made from
// the configuration, the devices, the shard groups, and which ranks share a host.
// torch/ranks/rank_joining.h joins ranks by this decision, and the forecast predicts by it. Pure
// functions of plain values; any thread. Errors: ConfigError for settings that do not fit the ranks
// or their devices.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "strata/comm/traits.h"

namespace strata::comm {

enum class CollectivesKind : std::uint8_t { kAuto, kLocal, kShm, kC10d, kNccl, kPeer };
// The transport of weights or gradients between GPUs; kAuto: as CollectivesKind says.
enum class TransportKind : std::uint8_t { kAuto, kPeer, kNccl };
std::string_view name_of(CollectivesKind kind);  // as configurations spell it
std::string_view name_of(TransportKind kind);

// strata.collectives, strata.gather, strata.reduce.
struct TransportSettings {
  CollectivesKind collectives = CollectivesKind::kAuto;
  TransportKind gather = TransportKind::kAuto;
  TransportKind reduce = TransportKind::kAuto;
  // Peers cannot read the memory in which weights rest, so all ranks take part in a gather: NCCL on
  // GPUs (make_joint_gathers() on the host).
  bool joint_gathers = false;
};

// Facts about one rank that it knows before it reaches the others.
struct RankFacts {
  int world_size = 1;
  int group_size = 1;  // of a shard group
  bool on_gpu = false;
  bool has_nccl = true;  // this build of torch
  std::string device;    // of the model, for errors: "cuda:0"
};
// Throws if the settings are impossible for this rank, whatever the other ranks have.
void require_possible(const TransportSettings& settings, const RankFacts& facts);

// Ranks that exchange bytes with each other.
struct RankSet {
  int size = 1;
  bool one_host = true;
};

// The transports of weights and of gradients if the control plane does not carry them. kAuto: peers
// if all ranks reach each other's memory, unless a probe finds NCCL faster; else NCCL.
struct BulkTransports {
  TransportKind gather = TransportKind::kAuto;
  TransportKind reduce = TransportKind::kAuto;
  bool has(TransportKind kind) const { return gather == kind || reduce == kind; }
  bool operator==(const BulkTransports&) const = default;
};

struct TransportChoice {
  enum class Control : std::uint8_t {
    kNone,          // one rank
    kSharedMemory,  // of one host
    kBackend,       // a process group
  };
  Control control = Control::kNone;
  std::optional<BulkTransports> bulk;  // nothing: the control plane carries everything
  bool operator==(const TransportChoice&) const = default;
};

// `inside`: the ranks of a shard group, which are all ranks where there is one group.
TransportChoice choose_inside(const TransportSettings& settings, const RankSet& inside,
                              bool on_gpus);
// `across`: the ranks that hold the same slice, one of each of several groups.
TransportChoice choose_across(const TransportSettings& settings, const RankSet& across,
                              bool on_gpus);

// The traits on rank 0 of the set, if a probe leaves kAuto to peers.
Traits traits_of(const TransportChoice& choice, int size, bool on_gpus);

}  // namespace strata::comm
