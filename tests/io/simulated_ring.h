// A RequestRing that serves requests itself, by SystemCalls (faulty_calls.h has some that
// misbehave), as freely as a kernel may: in any order, some now and some later, with EAGAIN for
// requests that must not block, and wakes that bring nothing; all from a seed. It checks the
// engine's promises: no more requests than there is room for, and only registered memory by its
// number.
// Threads: as RequestRing; the functions of tests from anywhere.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>

#include "strata/base/error.h"
#include "strata/io/pending_range.h"
#include "strata/io/uring_engine.h"

namespace strata::testing {

// A test sets the ring's behaviour here, and reads its counts; the test and the ring share it.
class RingWatch {
 public:
  // From now on registering fails with this errno.
  void refuse_regions(int code) {
    with([&] { region_code_ = code; });
  }
  // After this number of further requests, the ring serves no more.
  void break_after(int requests) {
    with([&] { left_ = requests; });
  }
  // While held, no request ends.
  void hold(bool held) {
    with([&] { held_ = held; });
    changed_.notify_all();
  }
  // While late, a ring that is withdrawn goes on with its requests.
  void be_late(bool late) {
    with([&] { late_ = late; });
    changed_.notify_all();
  }
  // Waits until the ring is withdrawn, with requests under way.
  void wait_for_withdrawal() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return withdrawn_; });
  }
  // Waits until `depth` requests are under way at once.
  void wait_for_depth(std::size_t depth) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return under_way_ >= depth; });
  }
  std::size_t deepest() {
    const std::lock_guard lock(mutex_);
    return deepest_;
  }
  int requests_in_regions() {
    const std::lock_guard lock(mutex_);
    return in_regions_;
  }

 private:
  friend class SimulatedRing;
  template <typename Change>
  void with(Change&& change) {
    const std::lock_guard lock(mutex_);
    change();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  int region_code_ = 0;
  int left_ = -1;  // below 0: no end
  bool held_ = false;
  bool woken_ = false;
  bool late_ = false;
  bool withdrawn_ = false;
  std::size_t under_way_ = 0;
  std::size_t deepest_ = 0;
  int in_regions_ = 0;
};

class SimulatedRing final : public io::RequestRing {
 public:
  SimulatedRing(int depth, unsigned seed, std::shared_ptr<io::SystemCalls> calls,
                std::shared_ptr<RingWatch> watch = std::make_shared<RingWatch>())
      : depth_(static_cast<std::size_t>(depth)),
        random_(seed),
        calls_(std::move(calls)),
        watch_(std::move(watch)) {}

  void begin() override {}
  void push(const Request& request) override {
    EXPECT_LT(pending_.size(), depth_);
    EXPECT_TRUE((request.target == nullptr) != (request.source == nullptr));
    EXPECT_GT(request.bytes, 0U);
    for (const Request& other : pending_) EXPECT_NE(other.id, request.id);
    if (request.region >= 0) check_region(request);
    pending_.push_back(request);
  }

  void wait(std::vector<Result>& results) override {
    std::unique_lock lock(watch_->mutex_);
    watch_->under_way_ = pending_.size();
    watch_->deepest_ = std::max(watch_->deepest_, pending_.size());
    watch_->changed_.notify_all();
    watch_->changed_.wait(
        lock, [this] { return watch_->woken_ || (!pending_.empty() && !watch_->held_); });
    const bool woken = std::exchange(watch_->woken_, false);
    if (watch_->held_ || (woken && random_() % 2 == 0)) return;
    std::size_t count = pending_.empty() ? 0 : 1 + random_() % pending_.size();
    if (watch_->left_ >= 0) {
      count = std::min(count, static_cast<std::size_t>(watch_->left_));
      watch_->left_ -= static_cast<int>(count);
      if (!pending_.empty() && count == 0) throw IoError("the ring broke");
    }
    lock.unlock();
    std::shuffle(pending_.begin(), pending_.end(), random_);
    for (; count > 0; --count) {
      const Request request = pending_.back();
      pending_.pop_back();
      results.push_back({request.id, serve(request)});
    }
  }

  void withdraw() noexcept override {
    std::unique_lock lock(watch_->mutex_);
    watch_->withdrawn_ = !pending_.empty();
    watch_->changed_.notify_all();
    watch_->changed_.wait(lock, [this] { return !watch_->late_; });
    lock.unlock();
    for (const Request& request : pending_) serve(request);  // the memory is there still
    pending_.clear();
  }

  void wake() override {
    watch_->with([this] { watch_->woken_ = true; });
    watch_->changed_.notify_all();
  }

  int register_region(int region, std::span<std::byte> memory) override {
    EXPECT_FALSE(regions_.contains(region));
    const std::lock_guard lock(watch_->mutex_);
    if (watch_->region_code_ == 0) regions_[region] = memory;
    return watch_->region_code_;
  }
  void unregister_region(int region) override { EXPECT_EQ(regions_.erase(region), 1U); }
  int regions_max() const override { return 2; }

 private:
  void check_region(const Request& request) {
    const std::byte* const first = request.target != nullptr ? request.target : request.source;
    ASSERT_TRUE(regions_.contains(request.region));
    const std::span<std::byte> region = regions_[request.region];
    EXPECT_GE(first, region.data());
    EXPECT_LE(first + request.bytes, region.data() + region.size());
    watch_->with([this] { ++watch_->in_regions_; });
  }

  std::int64_t serve(const Request& request) {
    if (!request.may_block && random_() % 8 == 0) return -EAGAIN;
    if (request.target != nullptr)
      return calls_->read_at(request.fd, {request.target, request.bytes}, request.offset);
    return calls_->write_at(request.fd, {request.source, request.bytes}, request.offset);
  }

  const std::size_t depth_;
  std::mt19937 random_;
  const std::shared_ptr<io::SystemCalls> calls_;
  const std::shared_ptr<RingWatch> watch_;
  std::vector<Request> pending_;
  std::map<int, std::span<std::byte>> regions_;
};

}  // namespace strata::testing
