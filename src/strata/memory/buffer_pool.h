// Buffers of the same few sizes that are taken and given back again and again, as units' gathers
// and gradients do. The pool keeps a returned buffer for the next request of its size, so a
// training step allocates nothing once every size has been seen. The allocate function makes a
// `Buffer`, for example device::Memory; it has `std::span<std::byte> bytes()`. Threads: one thread
// at a time. Ownership: the pool must outlive its leases. The holder of a lease gives the buffer
// back after its work is complete, or orders the next use after it: the pool knows no streams.
// Errors: those of the allocate function; after an OutOfMemoryError the pool frees the cached
// buffers and calls it once more.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/base/units.h"

namespace strata::memory {

template <typename Buffer>
class BufferPool : NonCopyable {
 public:
  // Makes a buffer of exactly these bytes.
  using Allocate = std::function<std::unique_ptr<Buffer>(Bytes)>;
  struct GiveBack {
    BufferPool* pool = nullptr;
    void operator()(Buffer* buffer) const noexcept {
      pool->give_back(std::unique_ptr<Buffer>(buffer));
    }
  };
  using Lease = std::unique_ptr<Buffer, GiveBack>;  // a buffer in use

  // `rounds`: end_round() keeps what the busiest of the last `rounds` used. The first round does
  // not count once there is another.
  explicit BufferPool(Allocate allocate, std::size_t rounds = 1)
      : allocate_(std::move(allocate)), rounds_(rounds) {}

  // `preferred`: the buffer to take if it is cached; it may be gone.
  Lease acquire(Bytes bytes, const Buffer* preferred = nullptr) {
    auto cached = std::find_if(cached_.rbegin(), cached_.rend(), [&](const auto& buffer) {
      return buffer.get() == preferred && size_of(*buffer) == bytes;
    });
    if (cached == cached_.rend())
      cached = std::find_if(cached_.rbegin(), cached_.rend(), has_size(bytes));
    if (cached != cached_.rend()) {
      std::unique_ptr<Buffer> buffer = std::move(*cached);
      cached_.erase(std::next(cached).base());
      return lease(std::move(buffer));
    }
    try {
      return make(bytes);
    } catch (const OutOfMemoryError&) {
      if (cached_.empty()) throw;
    }
    trim();  // buffers that are cached in other sizes may hold the missing memory
    return make(bytes);
  }

  // Like acquire(), but makes the buffer, and frees no other buffer if there is no memory for it.
  Lease acquire_new(Bytes bytes) {
    try {
      return make(bytes);
    } catch (...) {
      Use& use = uses_[bytes.value];  // the round keeps as many as if there had been this one
      use.most = std::max(use.most, use.now + 1);
      throw;
    }
  }
  // Takes a lease's buffer for good, and gives the lease a new one of its size. Uses and frees no
  // cached buffer.
  std::unique_ptr<Buffer> replace(Lease& lease) {
    std::unique_ptr<Buffer> buffer = allocate_(size_of(*lease));
    STRATA_ASSERT(buffer && size_of(*buffer) == size_of(*lease));
    std::unique_ptr<Buffer> taken(lease.release());
    lease.reset(buffer.release());
    return taken;
  }
  // Whether acquire() will find a cached buffer.
  bool has_cached(Bytes bytes) const { return std::ranges::any_of(cached_, has_size(bytes)); }

  // Frees the cached buffers.
  void trim() { cached_.clear(); }
  // Cached buffers and buffers in use together take at most `limit`: the pool frees cached buffers
  // that were given back longest ago before it makes a new one. Buffers in use alone may exceed the
  // limit.
  void set_total_limit(Bytes limit) {
    STRATA_ASSERT(limit.value >= 0);
    limit_ = limit;
    keep_limit();
  }

  // Frees the buffers of each size beyond the most that were in use at once in the rounds that
  // count, so that a pool without limits follows the needs of a repeated pass.
  void end_round() {
    for (auto& [bytes, use] : uses_) {
      use.recent.resize(rounds_);
      use.recent[ended_ % rounds_] = ended_ == 0 ? 0 : use.most;
      const std::size_t most = ended_ == 0 ? use.most : *std::ranges::max_element(use.recent);
      use.most = use.now;
      auto idle = static_cast<std::size_t>(std::ranges::count_if(cached_, has_size(Bytes(bytes))));
      for (; idle > 0 && use.now + idle > most; --idle)
        cached_.erase(std::ranges::find_if(cached_, has_size(Bytes(bytes))));
    }
    ++ended_;
  }

  Bytes leased_bytes() const { return leased_bytes_; }
  Bytes cached_bytes() const {
    Bytes all;
    for (const auto& buffer : cached_) all += size_of(*buffer);
    return all;
  }

 private:
  struct Use {  // of one size: buffers in use at once
    std::size_t now = 0;
    std::size_t most = 0;             // in this round
    std::vector<std::size_t> recent;  // the most, by round
  };

  static Bytes size_of(Buffer& buffer) { return Bytes(buffer.bytes().size()); }
  static auto has_size(Bytes bytes) {
    return [bytes](const std::unique_ptr<Buffer>& buffer) { return size_of(*buffer) == bytes; };
  }

  Lease make(Bytes bytes) {
    keep_limit(bytes);
    std::unique_ptr<Buffer> buffer = allocate_(bytes);
    STRATA_ASSERT(buffer && size_of(*buffer) == bytes);
    return lease(std::move(buffer));
  }

  Lease lease(std::unique_ptr<Buffer> buffer) {
    Use& use = uses_[size_of(*buffer).value];
    cached_.reserve(cached_.size() + ++leases_);  // to give back allocates nothing
    use.most = std::max(use.most, ++use.now);
    leased_bytes_ += size_of(*buffer);
    return Lease(buffer.release(), GiveBack{this});
  }

  void give_back(std::unique_ptr<Buffer> buffer) noexcept {
    --leases_;
    --uses_.find(size_of(*buffer).value)->second.now;
    leased_bytes_ -= size_of(*buffer);
    cached_.push_back(std::move(buffer));
    keep_limit();
  }

  // `incoming`: bytes that are about to be in use, too.
  void keep_limit(Bytes incoming = {}) {
    while (!cached_.empty() && leased_bytes_ + cached_bytes() + incoming > limit_)
      cached_.erase(cached_.begin());
  }

  Allocate allocate_;
  std::size_t rounds_;
  Bytes limit_{std::numeric_limits<std::int64_t>::max()};
  std::vector<std::unique_ptr<Buffer>> cached_;  // in the order they were given back
  std::map<std::int64_t, Use> uses_;             // by size
  std::size_t leases_ = 0;
  Bytes leased_bytes_;
  std::size_t ended_ = 0;  // rounds
};

}  // namespace strata::memory
