// SystemCalls that misbehave as kernels may. Benign faults (short transfers, EINTR) come at random
// from a seed, which the conformance tests print; hard faults come at a chosen offset of the file.
// Threads: as SystemCalls asks.
#pragma once

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <random>

#include "strata/io/system_calls.h"

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

  std::int64_t read_at(int fd, std::span<std::byte> target, Bytes offset) override {
    const Verdict verdict = judge(target.size(), offset);
    if (!verdict.let_through) return verdict.value;
    return kernel_.read_at(fd, target.first(static_cast<std::size_t>(verdict.value)), offset);
  }
  std::int64_t write_at(int fd, std::span<const std::byte> source, Bytes offset) override {
    const Verdict verdict = judge(source.size(), offset);
    if (!verdict.let_through) return verdict.value;
    return kernel_.write_at(fd, source.first(static_cast<std::size_t>(verdict.value)), offset);
  }

 private:
  struct Verdict {
    bool let_through;
    std::int64_t value;  // bytes to move, or what to return instead
  };

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

  io::KernelCalls kernel_;
  std::mutex mutex_;
  std::mt19937 random_;
  bool benign_ = true;
  std::map<std::int64_t, std::int64_t> hard_;
};

}  // namespace strata::testing
