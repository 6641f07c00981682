// A rank, a thread, whose gathers and reductions are carried by different collectives: peers and a
// network, which share one control plane.
#pragma once

#include <memory>
#include <utility>

#include "comm/collective_network.h"
#include "strata/comm/combined/combined_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/device/cpu_device.h"

namespace strata::comm::conformance {

enum class PeersCarry { kGathers, kReductions };

inline std::unique_ptr<Collectives> split_rank(std::shared_ptr<Collectives> control,
                                               PeersCarry carry, const CommOptions& options = {}) {
  std::shared_ptr<Collectives> peers =
      make_peer_collectives(std::make_shared<device::CpuDevice>(), control, options);
  auto network = std::make_shared<CollectiveNetwork>(std::move(control));
  if (carry == PeersCarry::kGathers)
    return make_split_collectives(std::move(peers), std::move(network));
  return make_split_collectives(std::move(network), std::move(peers));
}

}  // namespace strata::comm::conformance
