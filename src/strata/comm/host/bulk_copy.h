// Copies between the buffers of ranks.
// Threads: split over `pool` when one is given. When it returns, the bytes are visible to every
// thread that acquires a later release store of the calling thread.
#pragma once

#include <cstddef>
#include <span>

namespace strata {
class ThreadPool;
}

namespace strata::comm {

enum class CopyHint {
  kInCaches,    // the target fits there and is read soon
  kPastCaches,  // it does not: stores that do not first read their line save a third of the traffic
};

// Spans of equal length that do not overlap.
void bulk_copy(std::span<std::byte> target, std::span<const std::byte> source, CopyHint hint,
               ThreadPool* pool);

}  // namespace strata::comm
