// Units that stay whole, between a step and their next use.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/core/short_passes.h"
#include "strata/engine/gather/gatherer.h"

namespace strata::engine::fake {
namespace {

constexpr std::int64_t kBlock = 4096;  // elements

// Nine units.
FakeModel nine_units() {
  plan::ModelBuilder b;
  b.linear(0, "embed", kBlock);
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 8; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    b.param(b.module(layer, "proj", "Linear"), "weight", kBlock);
  }
  return FakeModel(b);
}

// Stage 2, refreshed beside the next forward.
RankOptions late_refresh(bool can_await) {
  RankOptions options;
  options.engine.stage = 2;
  options.engine.gather_lazily = true;
  options.can_await = can_await;
  return options;
}

TEST(GathererRefresh, AWholeUnitIsAwaitedFromTheStepToItsFirstUse) {
  const FakeModel model = nine_units();
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, late_refresh(true), std::move(collectives));
    for (int i = 0; i < 2; ++i) {
      train_one_pass(rank);
      for (int unit = 0; unit < 9; ++unit) EXPECT_TRUE(rank.views().attached(unit));
      step(rank);
      for (int unit = 0; unit < 9; ++unit) {
        EXPECT_TRUE(rank.views().awaited(unit));
        EXPECT_FALSE(rank.gatherer().gathered(unit));
      }
      rank.gatherer().complete(4);  // as a reader does
      rank.gatherer().complete(4);
      rank.gatherer().acquire(2);
      rank.gatherer().release(2);
      for (int unit = 0; unit < 9; ++unit) {
        EXPECT_EQ(rank.gatherer().gathered(unit), unit == 2 || unit == 4);
        EXPECT_EQ(rank.views().attached(unit), unit == 2 || unit == 4);
      }
    }
  });
}

// They have their memory, so that no bound on gathered units concerns them.
TEST(GathererRefresh, AllWholeUnitsAreFetchedBesideTheUpdate) {
  const FakeModel model = nine_units();
  on_two_ranks([&](auto collectives) {
    RankOptions options = late_refresh(true);
    options.engine.max_live = block_bytes();
    FakeRank rank(model, options, std::move(collectives));
    train_one_pass(rank);
    EXPECT_EQ(rank.gatherer().first_needed().size(), 9U);
  });
}

TEST(GathererRefresh, AWholeUnitThatNobodyUsesIsCompleteBeforeItsShardsChangeAgain) {
  const FakeModel model = nine_units();
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, late_refresh(true), std::move(collectives));
    train_one_pass(rank);
    step(rank);
    rank.engine().begin_forward();  // nothing is used in it
    rank.engine().begin_backward(true);
    for (int p = 0; p < model.count(); ++p) rank.add(p, noises(1, model.numel(p)));
    rank.engine().end_backward();
    rank.gatherer().invalidate(Changed::kTrainable);
    for (int unit = 0; unit < 9; ++unit) EXPECT_TRUE(rank.views().attached(unit));
    step(rank);
    const std::vector<std::byte> late = rank.weight(3);
    const auto everybody = rank.collectives().all_gather_text(
        std::string(reinterpret_cast<const char*>(late.data()), late.size()));
    EXPECT_EQ(everybody[0], everybody[1]);
  });
}

// Another thread that looks at weights while this one trains, such as a moving average of them.
TEST(GathererRefresh, ReadersInOtherThreadsCompleteUnitsBesideTraining) {
  const FakeModel model = nine_units();
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, late_refresh(true), std::move(collectives));
    rank.engine().recorder().set_timed(true);
    for (int i = 0; i < 20; ++i) {
      train_one_pass(rank);
      step(rank);
      std::thread reader([&rank] {
        for (int unit = 9; unit-- > 0;) {
          rank.gatherer().complete(unit);
          EXPECT_TRUE(rank.gatherer().gathered(unit));
        }
      });
      rank.forward();
      reader.join();
      for (int unit = 0; unit < 9; ++unit) EXPECT_TRUE(rank.views().attached(unit));
    }
  });
}

TEST(GathererRefresh, WhereReadersCannotBeToldWholeUnitsAreCompleteAfterTheStep) {
  const FakeModel model = nine_units();
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, late_refresh(false), std::move(collectives));
    train_one_pass(rank);
    step(rank);
    for (int unit = 0; unit < 9; ++unit) EXPECT_TRUE(rank.gatherer().gathered(unit));
  });
}

// Two ranks of which the second reads late: only when the first has written its weights, or waits
// for its peers' reading.
class LateReader final : public comm::Collectives {
 public:
  struct Gate {
    std::atomic<bool> closed = false;
    void open() {
      closed = false;
      closed.notify_all();
    }
  };
  LateReader(std::shared_ptr<comm::Collectives> ranks, Gate& gate)
      : Collectives(ranks->rank(), ranks->traits()), ranks_(std::move(ranks)), gate_(gate) {}

  std::string_view name() const override { return ranks_->name(); }
  std::unique_ptr<comm::SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return ranks_->allocate(std::move(name), bytes);
  }
  std::unique_ptr<comm::Work> all_gather(const comm::SliceMap& slices, std::span<std::byte> flat,
                                         std::string_view tag) override {
    if (rank() == 1) gate_.closed.wait(true);
    return ranks_->all_gather(slices, flat, tag);
  }
  std::unique_ptr<comm::Work> finish_gathers() override {
    if (rank() == 0) gate_.open();
    return ranks_->finish_gathers();
  }
  std::unique_ptr<comm::Work> reduce_scatter(const comm::Reduction& reduction,
                                             std::string_view tag) override {
    return ranks_->reduce_scatter(reduction, tag);
  }
  std::unique_ptr<comm::Work> exchange(const comm::Exchange& exchange,
                                       std::string_view tag) override {
    return ranks_->exchange(exchange, tag);
  }
  void all_reduce(std::span<double> values, comm::ReduceOp op) override {
    ranks_->all_reduce(values, op);
  }
  void broadcast(std::span<std::byte> bytes, int root) override { ranks_->broadcast(bytes, root); }
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return ranks_->all_gather_text(text);
  }
  void barrier() override { ranks_->barrier(); }
  void require_usable() override { ranks_->require_usable(); }
  void end(comm::Ending ending, std::string_view reason) noexcept override {
    ranks_->end(ending, reason);
  }

 private:
  std::shared_ptr<comm::Collectives> ranks_;
  Gate& gate_;
};

// A script writes weights after a step, on a rank whose slices a peer has yet to read.
TEST(GathererRefresh, APeerGetsTheWeightsOfTheStepWhateverIsWrittenAfterIt) {
  const FakeModel model = nine_units();
  for (const int stage : {0, 2}) {
    LateReader::Gate gate;
    std::vector<std::vector<std::byte>> of_the_step(9);  // by unit, of rank 0
    on_two_ranks([&](auto collectives) {
      RankOptions options;
      options.engine.stage = stage;
      FakeRank rank(model, options, std::make_shared<LateReader>(std::move(collectives), gate));
      train_one_pass(rank);
      rank.collectives().barrier();
      gate.closed = true;
      rank.collectives().barrier();
      step(rank);
      if (rank.collectives().rank() == 0) {
        for (int unit = 0; unit < 9; ++unit) {
          const auto flat = rank.gatherer().flat(unit);
          of_the_step[static_cast<std::size_t>(unit)].assign(flat.begin(), flat.end());
          std::ranges::fill(flat, std::byte(1));
        }
        gate.open();
      }
      rank.collectives().barrier();
      if (rank.collectives().rank() == 0) return;
      for (int unit = 0; unit < 9; ++unit) {
        EXPECT_TRUE(std::ranges::equal(rank.gatherer().flat(unit),
                                       of_the_step[static_cast<std::size_t>(unit)]))
            << "unit " << unit << ", stage " << stage;
      }
    });
  }
}

}  // namespace
}  // namespace strata::engine::fake
