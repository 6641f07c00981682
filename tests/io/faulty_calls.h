// SystemCalls that misbehave as kernels may. Benign faults (short transfers, EINTR) come at random
// from a seed, which the conformance tests print; hard faults come at a chosen offset of the file.
// Direct transfers are short by whole sectors, as devices' are, and may be refused altogether.
// Threads: as SystemCalls asks.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <optional>
#include <random>

#include "strata/io/pending_range.h"

namespace strata::testing {

class FaultyCalls final : public io::SystemCalls {
 public:
  explicit FaultyCalls(unsigned seed) : random_(seed) {}

  // From now on, a call that reaches the byte at `offset` stops before it; one that begins there
  // returns `result` (-errno, or 0 for an end of file).
  void fail_at(Bytes offset, std::int64_t result) {
    const std::lock_guard lock(mutex_);
    hard_[offset.value] = result;
  }
  void set_benign(bool benign) {
    const std::lock_guard lock(mutex_);
    benign_ = benign;
  }

  // From now on, every direct transfer returns `result`.
  void fail_direct(std::int64_t result) {
    const std::lock_guard lock(mutex_);
    direct_result_ = result;
  }
  int direct_calls() {
    const std::lock_guard lock(mutex_);
    return direct_calls_;
  }
  // The bytes that direct transfers have moved.
  Bytes direct_bytes() {
    const std::lock_guard lock(mutex_);
    return direct_bytes_;
  }

  std::int64_t read_at(int fd, std::span<std::byte> target, Bytes offset) override {
    return move(fd, target.size(), offset, [&](std::size_t bytes) {
      return kernel_.read_at(fd, target.first(bytes), offset);
    });
  }
  std::int64_t write_at(int fd, std::span<const std::byte> source, Bytes offset) override {
    return move(fd, source.size(), offset, [&](std::size_t bytes) {
      return kernel_.write_at(fd, source.first(bytes), offset);
    });
  }

 private:
  static constexpr std::int64_t kSector = 512;
  struct Verdict {
    bool let_through;
    std::int64_t value;  // bytes to move, or the result to return instead
  };

  template <typename Call>
  std::int64_t move(int fd, std::size_t bytes, Bytes offset, const Call& call) {
    const bool direct = (::fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    Verdict verdict = judge(bytes, offset);
    if (direct && verdict.let_through && verdict.value > kSector) verdict.value &= ~(kSector - 1);
    if (direct && verdict.let_through && verdict.value < kSector) verdict.value = kSector;
    if (direct) verdict = count_direct(verdict);
    if (!verdict.let_through) return verdict.value;
    const std::int64_t moved = call(static_cast<std::size_t>(verdict.value));
    const std::lock_guard lock(mutex_);
    if (direct && moved > 0) direct_bytes_ += Bytes(moved);
    return moved;
  }

  Verdict count_direct(Verdict verdict) {
    const std::lock_guard lock(mutex_);
    ++direct_calls_;
    return direct_result_ ? Verdict{false, *direct_result_} : verdict;
  }

  Verdict judge(std::size_t bytes, Bytes offset) {
    const std::lock_guard lock(mutex_);
    std::int64_t count = static_cast<std::int64_t>(bytes);
    if (benign_) {
      const auto dice = random_() % 4;
      if (dice == 0) return {false, -EINTR};
      if (dice < 3) count = 1 + static_cast<std::int64_t>(random_() % bytes);
    }
    const auto fault = hard_.lower_bound(offset.value);
    if (fault != hard_.end()) {
      if (fault->first == offset.value) return {false, fault->second};
      count = std::min(count, fault->first - offset.value);
    }
    return {true, count};
  }

  io::SystemCalls kernel_;
  std::mutex mutex_;
  std::mt19937 random_;
  bool benign_ = true;
  std::map<std::int64_t, std::int64_t> hard_;
  std::optional<std::int64_t> direct_result_;
  int direct_calls_ = 0;
  Bytes direct_bytes_;
};

}  // namespace strata::testing
