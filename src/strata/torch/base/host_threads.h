// How many threads of a rank work on host memory: kernels, and the values of a model on their way
// into the engine. One rule for everybody who asks. What torch would use for itself does not
// matter: launchers set that to one. Results never depend on the number. Threads: any. Errors:
// none; what the system does not tell counts as one core, or as no limit.
#pragma once

#include <optional>
#include <vector>

#include "strata/io/thread_engine.h"

namespace strata::torch {

// More than these bring no more bytes a second from one socket's memory.
inline constexpr int kMostHostThreads = 32;

// Cores that this process may run on, and no more than its control group has time for.
int usable_cores();

// Of `world_size` ranks, those on this host: LOCAL_WORLD_SIZE as launchers write it, else all.
int ranks_of_host(int world_size);

// `wanted`: of the configuration (strata.threads), taken as it is. Else the cores of this host by
// its ranks, from 1 to kMostHostThreads.
int host_threads(std::optional<int> wanted, int world_size);

// The same of rank 0 while it reads all of a model on the host and every other rank only what it
// keeps, at the speed of its link: rank 0 takes the cores that the links leave, too.
int reference_threads(std::optional<int> wanted, int world_size);

// The cores that `threads` of this rank are bound to (base/rank_cores.h), empty where they are not.
// Only with a launcher that says which of the host's ranks this is: LOCAL_RANK, LOCAL_WORLD_SIZE.
std::vector<int> host_cores(int threads);

// How a rank of `threads` reads files: with as many at once as the page cache needs to be read at
// the speed of a link, and as a drive needs to be busy, all of them on the buffers of one ring. One
// thread of four is left for those that queue copies and map memory meanwhile: with all of them
// reading, links take a tenth longer for the same bytes.
io::ThreadEngineOptions reading_options(int threads);

}  // namespace strata::torch
