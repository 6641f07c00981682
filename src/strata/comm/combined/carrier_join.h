// Makes the collectives whose bulk data goes as carriers.h has chosen: peers, NCCL, or one for
// gathers and the other for reductions. Where the choice is "auto", peers are taken as far as they
// reach each other's memory, and a probe compares NCCL with them where NCCL runs anyway.
// Threads: that of the rank. Errors: CommError, on every rank.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "strata/comm/carriers.h"
#include "strata/comm/collectives.h"
#include "strata/comm/combined/collectives_probe.h"

namespace strata::comm {

// Ways to make the collectives of one set of ranks. Each is collective, and throws CommError on
// every rank or on none.
struct CarrierMakers {
  using Make = std::function<std::shared_ptr<Collectives>()>;
  Make peers;
  Make nccl;               // null: NCCL is not available; "auto" is peers then
  bool nccl_runs = false;  // on every rank: to probe it costs little
  std::function<ProbeTimes(Collectives&)> probe;
  // Tells the user of a choice, `warning` where it is not the usual one. Called on every rank.
  std::function<void(bool warning, const std::string& text)> say;
};

struct ProbedCarriers {
  ProbeTimes peer;
  ProbeTimes nccl;
};

struct JoinedCarriers {
  std::shared_ptr<Collectives> collectives;
  std::optional<ProbedCarriers> probe;  // nothing: there was none
};

// Collective.
JoinedCarriers join_carriers(BulkCarriers wanted, const CarrierMakers& makers);

// Replaces "auto" in `wanted` by the faster transport. Times are the same on every rank. They are
// infinite if a rank had no memory to measure them.
BulkCarriers choose_faster(BulkCarriers wanted, const ProbedCarriers& probed);

}  // namespace strata::comm
