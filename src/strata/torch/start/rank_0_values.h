// Reads rank 0's values if all ranks share its host: each rank reads its own part in rank 0's
// memory. So rank 0's values win, ranks compare nothing, and no rank reads values that it does not
// keep. Units that stay whole are gathered meanwhile (engine/checkpoint/weight_loader.h). Threads:
// the engine's, and those that read. Ownership: borrows all.
#pragma once

#include <span>

#include "strata/engine/engine.h"
#include "strata/torch/start/adoption.h"

namespace strata::torch {

// Collective. `on_host`: this rank's parameters with values there, as the engine's memory grows.
// Returns whether it was done, the same on every rank; never at world size 1. If not, the engine's
// weights may be a mixture, and ranks with all values on the host give the reason in the init
// report. It cannot be done if a rank has values elsewhere, or none, of a parameter, or cannot read
// rank 0's memory. Nor can it be done if rank 0 has values in pages that it shares with another
// process, because reading would duplicate them, or if more than `copied_most` bytes are not
// contiguous. Rank 0 offers copies of those that are not contiguous, on the host until this
// returns. If the system asks for a permission to read, rank 0 grants it for that time
// (io::OfferedMemory). Call Engine::weights_changed() afterwards. `threads`: the number of threads
// that work on host memory (host_threads.h). Phase: "move in". Errors: those of
// load_weights_together() except IoError.
bool take_from_rank_0(engine::Engine& engine, const OriginalValues& values,
                      std::span<const int> on_host, int threads, Bytes copied_most = 1_GiB);

}  // namespace strata::torch
