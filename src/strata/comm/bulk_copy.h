// Copies between the buffers of ranks. Large copies go past the caches: what is gathered is larger
// than they are, and a store that does not read its cache line first saves a third of the traffic.
// Threads: split over `pool` when one is given. When it returns, the bytes are visible to whoever
// sees a later release store of the calling thread.
#pragma once

#include <cstddef>
#include <span>

namespace strata {
class ThreadPool;
}

namespace strata::comm {

// Spans of equal length that do not overlap.
void bulk_copy(std::span<std::byte> target, std::span<const std::byte> source, ThreadPool* pool);

}  // namespace strata::comm
