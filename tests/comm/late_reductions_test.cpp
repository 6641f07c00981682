// Reductions as an engine makes them, on devices whose streams run late: contributions are written
// on a stream of the caller's, into buffers that are used again; many reductions run at once; and
// only streams wait for streams.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>

#include "comm/conformance_ranks.h"
#include "comm/late_ranks.h"

namespace strata::comm::conformance {
namespace {

struct Places {
  int world = 1;
  int group = 1;
  Slices slices = Slices::kReplicated;
  bool shares_stream = false;  // contributions are written on the collectives' stream
};

void PrintTo(const Places& places, std::ostream* out) {
  *out << places.world << " ranks in groups of " << places.group
       << (places.slices == Slices::kSecondary ? ", secondary" : "")
       << (places.shares_stream ? ", one stream" : "");
}

// Whole numbers, so small that every order of adding gives the same.
float part(int rank, std::size_t index, int round) {
  return static_cast<float>(
      (static_cast<std::size_t>(rank) * 31 + index * 7 + static_cast<std::size_t>(round) * 13) %
      101);
}

// One rank, and the count of wrong elements that its "model" has found.
class Caller {
 public:
  Caller(Collectives& collectives, device::LateDevice& device, bool shares_stream)
      : collectives_(collectives),
        device_(device),
        place_(collectives.shard_position()),
        own_writes_(device.create_stream()),
        writes_(shares_stream ? collectives.stream(Traffic::kContributions) : own_writes_.get()) {
    require(writes_ != nullptr, "a stream");
    for (int i = 0; i < kBuffers; ++i)
      buffers_.push_back({collectives.allocate(fmt::format("gradients.{}", i), whole_bytes()), {}});
    for (int unit = 0; unit < kUnits; ++unit)
      results_.push_back(device.allocate(Bytes(kNumel * sizeof(float)), memory::Kind::kGradients));
  }

  // Several micro-steps, of which the last one adds up over groups where the others do not.
  void step(int number, int micro_steps, bool later) {
    for (int micro = 0; micro < micro_steps; ++micro) {
      const bool last = micro + 1 == micro_steps;
      for (int unit = 0; unit < kUnits; ++unit) {
        const int round = (number * micro_steps + micro) * kUnits + unit;
        const auto sums = later && micro > 0 ? Replicas::kSumAll : Replicas::kSum;
        reduce(unit, round, micro > 0, later && !last ? Replicas::kLater : sums);
      }
      for (auto& work : works_) work->wait();
      works_.clear();
      device_.compute_stream().wait_for(*writes_->record());
    }
    for (int unit = 0; unit < kUnits; ++unit) check(unit, number * micro_steps, micro_steps);
  }
  int wrong() {
    device_.compute_stream().synchronize();
    return wrong_.load();
  }

 private:
  static constexpr std::size_t kNumel = 300;
  static constexpr int kUnits = 7;
  static constexpr int kBuffers = 3;
  struct Buffer {
    std::unique_ptr<SharedBuffer> memory;
    std::shared_ptr<Work> reading;  // null: none does
  };

  Bytes whole_bytes() const {
    return Bytes(kNumel * sizeof(float) * static_cast<std::size_t>(place_.count));
  }
  std::span<float> result(int unit) {
    const auto bytes = results_[static_cast<std::size_t>(unit)]->bytes();
    return {reinterpret_cast<float*>(bytes.data()), kNumel};
  }

  void reduce(int unit, int round, bool accumulate, Replicas replicas) {
    Buffer& buffer = buffers_[static_cast<std::size_t>(next_++ % kBuffers)];
    if (buffer.reading != nullptr) buffer.reading->wait_for_readers();
    writes_->wait_for(*device_.compute_stream().record());
    device_.enqueue(*writes_,
                    [values = floats_of(*buffer.memory), rank = collectives_.rank(), round] {
                      for (std::size_t i = 0; i < values.size(); ++i)
                        values[i] = part(rank, i, round);
                    });
    Reduction reduction;
    reduction.source = buffer.memory.get();
    reduction.result = result(unit);
    reduction.accumulate = accumulate;
    reduction.writer = writes_;
    reduction.replicas = replicas;
    buffer.reading = collectives_.reduce_scatter(reduction, fmt::format("unit {}", unit));
    works_.push_back(buffer.reading);
    if (round % 3 == 0) works_.front()->done();
  }

  // A kernel of the compute stream, as an optimizer's is.
  void check(int unit, int first_micro, int micro_steps) {
    const auto at = static_cast<std::size_t>(place_.index) * kNumel;
    device_.enqueue(device_.compute_stream(), [this, values = result(unit), at, unit, first_micro,
                                               micro_steps, world = collectives_.world_size()] {
      for (std::size_t i = 0; i < values.size(); ++i) {
        float wanted = 0.0F;
        for (int micro = first_micro; micro < first_micro + micro_steps; ++micro) {
          for (int rank = 0; rank < world; ++rank)
            wanted += part(rank, at + i, micro * kUnits + unit);
        }
        if (values[i] != wanted) wrong_.fetch_add(1, std::memory_order_relaxed);
        values[i] = -1.0F;
      }
    });
  }

  Collectives& collectives_;
  device::LateDevice& device_;
  ShardPosition place_;
  std::unique_ptr<device::Stream> own_writes_;
  device::Stream* writes_;
  std::deque<Buffer> buffers_;
  std::vector<std::unique_ptr<device::Memory>> results_;
  std::deque<std::shared_ptr<Work>> works_;
  int next_ = 0;
  std::atomic<int> wrong_ = 0;
};

class LateReductions : public testing::TestWithParam<Places> {
 protected:
  // Runs `body` on every rank, over groups of peers; over plain peers if there is one group.
  static void run(const std::function<void(Caller&)>& body) {
    const Places places = GetParam();
    CommOptions options;
    options.timeout = std::chrono::seconds(60);
    GroupedRanks groups(places.world, places.group, options, places.slices);
    join_by_peers(groups, options.timeout);
    LocalGroup alone(places.world, options);
    std::vector<std::shared_ptr<device::LateDevice>> devices;
    for (int r = 0; r < places.world; ++r) devices.push_back(late_device(r));
    const auto make = [&](int rank) -> std::unique_ptr<Collectives> {
      const auto& device = devices[static_cast<std::size_t>(rank)];
      if (places.world > places.group) return groups.rank(rank, device);
      return make_peer_collectives(device, alone.rank(rank));
    };
    const auto results = run_as_threads(places.world, make, [&](Collectives& c) {
      device::LateDevice& device = *devices[static_cast<std::size_t>(c.rank())];
      Caller caller(c, device, places.shares_stream);
      body(caller);
      const int wrong = caller.wrong();
      c.barrier();
      return wrong == 0 ? std::string() : fmt::format("{} numbers are wrong", wrong);
    });
    EXPECT_THAT(results, testing::Each(""));
  }
};

INSTANTIATE_TEST_SUITE_P(Peers, LateReductions,
                         testing::Values(Places{1, 1}, Places{3, 3},
                                         Places{3, 3, Slices::kReplicated, true}, Places{4, 2},
                                         Places{6, 3}, Places{2, 1},
                                         Places{4, 2, Slices::kSecondary},
                                         Places{6, 3, Slices::kSecondary}));

TEST_P(LateReductions, GiveTheSumsOfAllRanksWhileManyAreOnTheirWay) {
  run([](Caller& caller) {
    for (int step = 0; step < 8; ++step) caller.step(step, 1, false);
  });
}

TEST_P(LateReductions, AddUpMicroSteps) {
  run([](Caller& caller) {
    for (int step = 0; step < 3; ++step) caller.step(step, 3, false);
  });
}

TEST_P(LateReductions, AddUpOverGroupsInTheLastMicroStep) {
  if (GetParam().slices == Slices::kSecondary) return;  // a single group owns everything
  run([](Caller& caller) {
    for (int step = 0; step < 3; ++step) caller.step(step, 3, true);
  });
}

}  // namespace
}  // namespace strata::comm::conformance
