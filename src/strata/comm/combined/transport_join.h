// Makes the collectives whose bulk data goes as transports.h has chosen: peers, NCCL, or one for
// gathers and the other for reductions. Where the choice is "auto", peers are taken as far as they
// reach each other's memory, and a probe compares NCCL with them where NCCL runs anyway.
// Threads: that of the rank. Errors: CommError, on every rank.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "strata/base/dtype.h"
#include "strata/comm/collectives.h"
#include "strata/comm/transports.h"
#include "strata/device/device.h"

namespace strata::comm {

// How fast collectives are between the ranks that there are: one gather and one reduction of
// kProbeBytes of weights, and of their gradients, a few times each, with nothing beside them.
// Threads, errors: collectives.h. Memory: three to five times kProbeBytes while it runs, uncharged.

inline constexpr Bytes kProbeBytes = 64_MiB;

// Seconds of the fastest round, on the slowest rank: the same on all. Infinite where some rank has
// no memory for it.
struct ProbeTimes {
  double gather = 0.0;
  double reduce = 0.0;
};

struct ProbedDTypes {
  DType weights = DType::kFloat32;
  DType reduce = DType::kFloat32;  // in which gradients are added up
};

// Collective. Gradients travel as the reducer would send them: in their own dtype if they are
// widened before they are added up, else as dtypes.reduce. `device`: where the model computes.
ProbeTimes probe(Collectives& collectives, device::Device& device, const ProbedDTypes& dtypes);

// Ways to make the collectives of one set of ranks. Each is collective, and throws CommError on
// every rank or on none.
struct TransportFactories {
  using Make = std::function<std::shared_ptr<Collectives>()>;
  Make peers;
  Make nccl;               // null: NCCL is not available; "auto" is peers then
  bool nccl_runs = false;  // on every rank: to probe it costs little
  std::function<ProbeTimes(Collectives&)> probe;
  // Tells the user of a choice, `warning` where it is not the usual one. Called on every rank.
  std::function<void(bool warning, const std::string& text)> say;
};

struct ProbedTransports {
  ProbeTimes peer;
  ProbeTimes nccl;
};

struct JoinedTransports {
  std::shared_ptr<Collectives> collectives;
  std::optional<ProbedTransports> probe;  // nothing: there was none
};

// Collective.
JoinedTransports join_transports(BulkTransports wanted, const TransportFactories& makers);

// Replaces "auto" in `wanted` by the faster transport. Times are the same on every rank. They are
// infinite if a rank had no memory to measure them.
BulkTransports choose_faster(BulkTransports wanted, const ProbedTransports& probed);

}  // namespace strata::comm
