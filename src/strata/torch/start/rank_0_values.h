// Values that rank 0 has on a host which all ranks share: each rank reads its own part where rank 0
// has it, so that rank 0's values win, nobody compares anything, and nobody reads what it does not
// keep. Units that stay whole are gathered meanwhile (engine/checkpoint/joint_loading.h). Threads:
// the engine's, and those that read. Ownership: borrows all.
#pragma once

#include <span>

#include "strata/engine/engine.h"
#include "strata/torch/start/original_values.h"

namespace strata::torch {

// Collective. `on_host`: this rank's parameters with values there, as the engine's memory grows.
// Whether it was done, the same on every rank; at world size 1 it never is. Else the engine's
// weights are a mixture, if anything, and on ranks with all values on the host the init report says
// why. It cannot be done where a rank has values elsewhere, or none, of a parameter, or cannot read
// rank 0's memory; nor where rank 0 has values in pages that another process has, too, which
// reading would double, or more than `copied_most` that are not contiguous: of these it offers
// copies, on the host until this returns. Where the system wants a permission for it, rank 0 gives
// it for that time (io::OfferedMemory). Follow with Engine::weights_changed(). `threads`: that work
// on host memory (host_threads.h). Phase: "move in". Errors: those of load_weights_together() but
// IoError.
bool take_from_rank_0(engine::Engine& engine, const OriginalValues& values,
                      std::span<const int> on_host, int threads, Bytes copied_most = 1_GiB);

}  // namespace strata::torch
