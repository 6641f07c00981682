// How fast collectives are between the ranks that there are: one gather and one reduction of
// kProbeBytes of weights, and of their gradients, a few times each, with nothing beside them.
// Threads, errors: collectives.h. Memory: three to five times kProbeBytes while it runs, uncharged.
#pragma once

#include "strata/base/dtype.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"

namespace strata::comm {

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

}  // namespace strata::comm
