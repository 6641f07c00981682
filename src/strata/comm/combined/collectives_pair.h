// Two Collectives that fail together, as parts of what is made of them: what one throws is the end
// of the other, too, so that all ranks hear of it, and every later call throws the same again.
// Threads: one thread of a rank. Ownership: shares both; works share the pair.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"

namespace strata::comm {

class CollectivesPair {
 public:
  CollectivesPair(std::shared_ptr<Collectives> first, std::shared_ptr<Collectives> second)
      : first_(std::move(first)), second_(std::move(second)) {}

  Collectives& first() const { return *first_; }
  Collectives& second() const { return *second_; }
  bool broken() const { return !failure_.empty(); }

  template <typename Call>
  auto guarded(Call&& call) -> decltype(call()) {
    if (broken()) throw CommError(failure_);
    try {
      return std::forward<Call>(call)();
    } catch (const CommError& error) {
      if (!broken()) failure_ = error.what();
      end(Ending::kFailed, failure_);
      throw CommError(failure_);
    }
  }

  void announce_departure(std::string_view words) {
    first_->announce_departure(words);
    second_->announce_departure(words);
  }
  void all_left() noexcept {
    first_->all_left();
    second_->all_left();
  }
  void end(Ending ending, std::string_view reason) noexcept {
    first_->end(ending, reason);
    second_->end(ending, reason);
  }

 private:
  std::shared_ptr<Collectives> first_;
  std::shared_ptr<Collectives> second_;
  std::string failure_;  // the first; empty: all is well
};

// The work of one of the two.
class PairWork final : public Work {
 public:
  PairWork(std::shared_ptr<CollectivesPair> pair, std::shared_ptr<Work> work)
      : pair_(std::move(pair)), work_(std::move(work)) {}

  bool done() override {
    return pair_->broken() || pair_->guarded([&] { return work_->done(); });
  }
  void wait() override {
    pair_->guarded([&] { work_->wait(); });
  }
  void wait_for_readers() override {
    pair_->guarded([&] { work_->wait_for_readers(); });
  }
  WorkTimes times() const override { return work_->times(); }

 private:
  std::shared_ptr<CollectivesPair> pair_;
  std::shared_ptr<Work> work_;
};

// Null stays null.
inline std::unique_ptr<Work> pair_work(std::shared_ptr<CollectivesPair> pair,
                                       std::unique_ptr<Work> work) {
  return work == nullptr ? nullptr : std::make_unique<PairWork>(std::move(pair), std::move(work));
}

// Collectives that are made of a pair, as far as all such are alike: `owner`, one of the pair,
// allocates the memory, and the first one gathers.
class PairedCollectives : public Collectives {
 public:
  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return pair_->guarded([&] { return owner_.allocate(std::move(name), bytes); });
  }
  std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    return pair_->guarded([&] { return owner_.allocate_growing(std::move(name), bytes); });
  }
  void unmap_freed() override {
    pair_->guarded([&] { owner_.unmap_freed(); });
  }
  std::unique_ptr<Work> finish_gathers() override {
    return pair_->guarded([&] { return pair_work(pair_, pair_->first().finish_gathers()); });
  }
  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    pair_->announce_departure(words);
  }
  void all_left() noexcept override { pair_->all_left(); }
  void require_usable() override {
    pair_->guarded([&] {
      pair_->first().require_usable();
      pair_->second().require_usable();
    });
  }
  void end(Ending ending, std::string_view reason) noexcept override { pair_->end(ending, reason); }

 protected:
  PairedCollectives(int rank, const Traits& traits, std::shared_ptr<CollectivesPair> pair,
                    Collectives& owner)
      : Collectives(rank, traits), pair_(std::move(pair)), owner_(owner) {}

  const std::shared_ptr<CollectivesPair> pair_;

 private:
  Collectives& owner_;
};

}  // namespace strata::comm
