// Collectives of devices of one host that reach each other's memory: GPUs of one NVLink domain.
//
// A gather is this rank's own copies from its peers' memory, on a stream of their own: no processor
// of the device takes part, no peer has to come, and ranks may gather different things. In a
// reduction each rank adds up its slice of all contributions in fp32 in the order of ranks: the
// same bits in every run. Contributions that go through an inbox lie in this rank's memory already;
// all others it reads where their ranks have them. Streams of different ranks wait for each other
// by flags in host memory; no kernel waits. Texts, numbers and the sync point before each reduction
// go through `control`.
//
// Threads, errors: collectives.h. A rank that dies is noticed at once by a thread of this object;
// streams that wait for it go on then, with invalid values: every later call throws.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"

namespace strata::comm {

// Collective. `device`: where this rank's model computes, an object of its own. `control`: of host
// memory, the same ranks, not used otherwise afterwards. Throws CommError, on every rank, where one
// of them cannot reach another's memory; `control` stays usable then. The timeout holds for a
// peer's answer, for a buffer that a peer has not allocated, and for streams that wait for a
// peer's; no pool is used.
std::unique_ptr<Collectives> make_peer_collectives(std::shared_ptr<device::Device> device,
                                                   std::shared_ptr<Collectives> control,
                                                   const CommOptions& options = {});

}  // namespace strata::comm
