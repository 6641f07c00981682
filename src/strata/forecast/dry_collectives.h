// One rank's collectives without the others: operations move nothing, and count as under way until
// somebody waits for them, so that what runs on them holds as much as it ever may. Texts and small
// values come back as if every rank had said the same.
// Threads: one thread at a time. Ownership: shares the device. Errors: none.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"

namespace strata::forecast {

// What of a job's collectives an engine acts upon.
struct Carriers {
  int world_size = 1;
  comm::ShardPlace place{};
  bool one_sided = true;
  bool deterministic = true;
  bool sums_in_fp32 = true;
  bool gathers_on_device = false;
  bool has_contribution_stream = false;
  bool has_inbox = false;
};
Carriers carriers_of(comm::Collectives& collectives);

std::unique_ptr<comm::Collectives> make_dry_collectives(const Carriers& carriers,
                                                        std::shared_ptr<device::Device> device);

}  // namespace strata::forecast
