// The number of threads with which a rank works on host memory: for kernels, and for copying a
// model's values into the engine. All callers share this rule. It ignores torch's own number of
// threads, because launchers set that to one. Results never depend on the number. Threads: any.
// Errors: none; if the system does not tell the number of cores, it counts as one; if it tells no
// limit, there is none.
#pragma once

#include <optional>
#include <vector>

#include "strata/io/thread_engine.h"

namespace strata::torch {

// More threads read no more bytes per second from the memory of one socket.
inline constexpr int kMostHostThreads = 32;

// The number of cores that this process may run on, limited by the CPU time of its control group.
int usable_cores();

// The number of ranks on this host: LOCAL_WORLD_SIZE if the launcher sets it, else `world_size`.
int ranks_of_host(int world_size);

// `wanted`: the configuration's strata.threads, which is returned unchanged if it is set. Otherwise
// the result is the cores of this host divided by its ranks, from 1 to kMostHostThreads.
int host_threads(std::optional<int> wanted, int world_size);

// The same for rank 0 at the start, when it reads the whole model on the host. The other ranks then
// read only the values that they keep, at the speed of their links, so rank 0 also takes the cores
// that they do not need.
int reference_threads(std::optional<int> wanted, int world_size);

// The cores that `threads` threads of this rank are bound to (base/rank_cores.h); empty if they are
// not bound. Binding needs a launcher that sets LOCAL_RANK and LOCAL_WORLD_SIZE.
std::vector<int> host_cores(int threads);

// Options with which a rank of `threads` threads reads files. Reading the page cache at the speed
// of a link, and keeping a drive busy, both need many concurrent reads, all into the buffers of one
// ring. One thread of four does not read: it is left for threads that queue copies and map memory.
// If all threads read, links take a tenth longer for the same bytes.
io::ThreadEngineOptions reading_options(int threads);

}  // namespace strata::torch
