// Buffers of the same few sizes that are taken and given back again and again, as gathers of units
// do. The pool keeps a returned buffer for the next request of its size, so a training step
// allocates nothing once every size has been seen. The allocate function makes a `Buffer`, for
// example device::Memory; it has `std::span<std::byte> bytes()`.
// Threads: internally synchronised; allocation and freeing happen outside the lock. Ownership:
// leases may outlive the pool. The holder of a lease gives the buffer back after its work is
// complete, or orders the next use after it: the pool knows no streams.
// Units: sizes are rounded up to pages, for matching and for allocation. Errors: those of the
// allocate function; after an OutOfMemoryError the pool frees the cached buffers and calls it once
// more.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/memory/host_buffer.h"

namespace strata::memory {

template <typename Buffer>
class BufferPool {
  struct State;
  static constexpr Bytes kUnbounded{std::numeric_limits<std::int64_t>::max()};

 public:
  using Allocate = std::function<std::unique_ptr<Buffer>(Bytes)>;

  // A buffer in use; given back by the destructor. Movable.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&& other) noexcept {
      if (this == &other) return *this;
      give_back();
      state_ = std::move(other.state_);
      buffer_ = std::move(other.buffer_);
      bytes_ = std::exchange(other.bytes_, {});
      return *this;
    }
    ~Lease() { give_back(); }
    std::span<std::byte> bytes() const { return bytes_; }  // exactly as many as asked for

   private:
    friend class BufferPool;
    Lease(std::shared_ptr<State> state, std::unique_ptr<Buffer> buffer, Bytes bytes)
        : state_(std::move(state)),
          buffer_(std::move(buffer)),
          bytes_(buffer_->bytes().first(bytes.size())) {}
    void give_back() noexcept {
      if (buffer_) state_->give_back(std::move(buffer_));
    }

    std::shared_ptr<State> state_;
    std::unique_ptr<Buffer> buffer_;  // null: holds nothing
    std::span<std::byte> bytes_;
  };

  // `allocate` makes buffers of exactly the bytes that it is asked for.
  explicit BufferPool(Allocate allocate)
      : allocate_(std::move(allocate)), state_(std::make_shared<State>()) {}

  Lease acquire(Bytes bytes) {
    const Bytes size = footprint(bytes);
    std::unique_ptr<Buffer> buffer = state_->take(size);
    if (!buffer) {
      state_->shrink_to(kUnbounded, size);
      buffer = allocate(size);
      STRATA_ASSERT(buffer && Bytes(buffer->bytes().size()) == size);
      state_->admit(size);
    }
    return Lease(state_, std::move(buffer), bytes);
  }

  // Like acquire(), but makes the buffer, and frees no other buffer if there is no memory for it.
  Lease acquire_new(Bytes bytes) {
    const Bytes size = footprint(bytes);
    state_->shrink_to(kUnbounded, size);
    std::unique_ptr<Buffer> buffer;
    try {
      buffer = allocate_(size);
    } catch (...) {
      state_->count_wish(size);
      throw;
    }
    STRATA_ASSERT(buffer && Bytes(buffer->bytes().size()) == size);
    state_->admit(size);
    return Lease(state_, std::move(buffer), bytes);
  }
  // Takes a lease's buffer for good, and gives the lease a new one of its size. Uses and frees no
  // cached buffer.
  std::unique_ptr<Buffer> replace(Lease& lease) {
    const Bytes size(lease.buffer_->bytes().size());
    std::unique_ptr<Buffer> buffer = allocate_(size);
    STRATA_ASSERT(buffer && Bytes(buffer->bytes().size()) == size);
    const std::size_t bytes = lease.bytes_.size();
    std::swap(buffer, lease.buffer_);
    lease.bytes_ = lease.buffer_->bytes().first(bytes);
    return buffer;
  }
  // Whether acquire() will find a cached buffer.
  bool has_cached(Bytes bytes) const { return state_->has(footprint(bytes)); }

  // The size of the buffer that holds `bytes`.
  static Bytes footprint(Bytes bytes) {
    STRATA_ASSERT(bytes.value >= 0);
    return align_up(std::max(bytes, Bytes(1)), page_size());
  }

  // Frees the cached buffers.
  void trim() { state_->shrink_to(Bytes()); }
  // Cached buffers and buffers in use together take at most `limit`: the pool frees cached buffers
  // that were given back longest ago before it makes a new one. Buffers in use alone may exceed the
  // limit.
  void set_total_limit(Bytes limit) {
    STRATA_ASSERT(limit.value >= 0);
    {
      const std::lock_guard lock(state_->mutex);
      state_->total_limit = limit;
    }
    state_->shrink_to(kUnbounded);
  }

  // Frees the buffers of each size beyond the most that were in use at once since the last call, so
  // that a pool without limits follows the needs of a repeated pass.
  void end_round() {
    for (;;) {
      const std::unique_ptr<Buffer> unused = state_->pop_unused();
      if (unused == nullptr) break;
    }
    state_->start_round();
  }

  // Buffers made since construction. The number no longer grows once every set of sizes that is in
  // use at a time was seen.
  std::int64_t allocations() const {
    const std::lock_guard lock(state_->mutex);
    return state_->allocations;
  }
  Bytes cached_bytes() const {
    const std::lock_guard lock(state_->mutex);
    return state_->cached_bytes;
  }
  Bytes leased_bytes() const {
    const std::lock_guard lock(state_->mutex);
    return state_->leased_bytes;
  }

 private:
  std::unique_ptr<Buffer> allocate(Bytes size) {
    try {
      return allocate_(size);
    } catch (const OutOfMemoryError&) {
      // Buffers that are cached in other sizes may hold the missing memory.
      if (!state_->shrink_to(Bytes())) throw;
    }
    return allocate_(size);
  }

  // All members are guarded by the mutex. Buffers are freed while it is not held.
  struct State {
    std::mutex mutex;
    Bytes total_limit = kUnbounded;
    std::vector<std::unique_ptr<Buffer>> cached;  // in the order they were given back
    std::size_t leases = 0;
    struct Use {
      std::size_t now = 0;
      std::size_t most = 0;  // in this round
    };
    std::map<std::int64_t, Use> uses;  // by size
    std::int64_t allocations = 0;
    Bytes cached_bytes;
    Bytes leased_bytes;

    static Bytes size_of(Buffer& buffer) { return Bytes(buffer.bytes().size()); }

    // The buffer of this size used last; null when there is none.
    std::unique_ptr<Buffer> take(Bytes size) {
      const std::lock_guard lock(mutex);
      for (auto at = cached.rbegin(); at != cached.rend(); ++at) {
        if (size_of(**at) != size) continue;
        std::unique_ptr<Buffer> buffer = std::move(*at);
        cached.erase(std::next(at).base());
        cached_bytes -= size;
        leased_bytes += size;
        ++leases;
        count_use(size);
        return buffer;
      }
      return nullptr;
    }

    bool has(Bytes size) {
      const std::lock_guard lock(mutex);
      return std::any_of(cached.begin(), cached.end(),
                         [&](const auto& buffer) { return size_of(*buffer) == size; });
    }

    // One more of this size was wanted: the round keeps as many as if there had been one.
    void count_wish(Bytes size) {
      const std::lock_guard lock(mutex);
      Use& use = uses[size.value];
      use.most = std::max(use.most, use.now + 1);
    }

    // Counts a new buffer as leased, and makes sure that giving it back will not allocate.
    void admit(Bytes size) {
      const std::lock_guard lock(mutex);
      cached.reserve(cached.size() + leases + 1);
      leased_bytes += size;
      ++leases;
      ++allocations;
      count_use(size);
    }

    // The mutex is held.
    void count_use(Bytes size) {
      Use& use = uses[size.value];
      use.most = std::max(use.most, ++use.now);
    }

    void start_round() {
      const std::lock_guard lock(mutex);
      for (auto& [size, use] : uses) use.most = use.now;
    }

    // A cached buffer of a size of which there are more than were in use at once; null: none.
    std::unique_ptr<Buffer> pop_unused() {
      const std::lock_guard lock(mutex);
      for (auto at = cached.begin(); at != cached.end(); ++at) {
        const Bytes size = size_of(**at);
        const Use& use = uses[size.value];
        const auto idle = static_cast<std::size_t>(std::count_if(
            cached.begin(), cached.end(), [&](const auto& b) { return size_of(*b) == size; }));
        if (idle + use.now <= use.most) continue;
        std::unique_ptr<Buffer> buffer = std::move(*at);
        cached.erase(at);
        cached_bytes -= size;
        return buffer;
      }
      return nullptr;
    }

    void give_back(std::unique_ptr<Buffer> buffer) noexcept {
      {
        const std::lock_guard lock(mutex);
        leased_bytes -= size_of(*buffer);
        --uses.find(size_of(*buffer).value)->second.now;
        cached_bytes += size_of(*buffer);
        --leases;
        cached.push_back(std::move(buffer));
      }
      shrink_to(kUnbounded);
    }

    // Frees cached buffers until they are at most `most`, and within the limits when `incoming`
    // bytes more are in use. Whether anything was freed.
    bool shrink_to(Bytes most, Bytes incoming = {}) noexcept {
      bool freed = false;
      while (pop_oldest_beyond(most, incoming)) freed = true;
      return freed;
    }

    std::unique_ptr<Buffer> pop_oldest_beyond(Bytes most, Bytes incoming) {
      const std::lock_guard lock(mutex);
      const Bytes keep = std::min(most, total_limit - leased_bytes - incoming);
      if (cached.empty() || cached_bytes <= keep) return nullptr;
      std::unique_ptr<Buffer> oldest = std::move(cached.front());
      cached.erase(cached.begin());
      cached_bytes -= size_of(*oldest);
      return oldest;
    }
  };

  const Allocate allocate_;
  const std::shared_ptr<State> state_;
};

}  // namespace strata::memory
