// Gathers of slices that change again and again, on devices whose streams run late: what keeps an
// update from what peers still read of the values before it, and a gather from values that are not
// there yet.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "comm/conformance_ranks.h"
#include "comm/late_ranks.h"
#include "strata/comm/local_collectives.h"

namespace strata::comm::conformance {
namespace {

// What every rank comes to before slices change: when it has waited for its gather, or on the
// device, when it has started it.
enum class Meeting { kAllReduce, kExchange };

class LateGathers : public testing::TestWithParam<Meeting> {};

// One rank: its slice, and all of them as they were gathered.
class Gathering {
 public:
  Gathering(Collectives& collectives, device::LateDevice& device)
      : collectives_(collectives),
        device_(device),
        world_(static_cast<std::size_t>(collectives.world_size())),
        slice_(collectives.allocate("weights", Bytes(kBytes))),
        flat_(device.allocate(Bytes(kBytes * world_), memory::Kind::kGathered)),
        numbers_(device.allocate(Bytes(sizeof(double) * (world_ + 1)), memory::Kind::kStaging)) {}

  void round(int number, Meeting meeting) {
    device::Stream& compute = device_.compute_stream();
    device_.enqueue(compute, [slice = slice_->local(), rank = collectives_.rank(), number] {
      fill(slice, rank, number);
    });
    collectives_.barrier();
    const auto gather =
        collectives_.all_gather({slice_.get(), 0_B, 0_B, Bytes(kBytes)}, flat_->bytes(), "weights");
    if (meeting == Meeting::kExchange) exchange();
    gather->wait();
    device_.enqueue(compute, [this, flat = flat_->bytes(), number] {
      for (std::size_t r = 0; r < world_; ++r) {
        for (std::size_t i = 0; i < kBytes; ++i) {
          if (flat[r * kBytes + i] != pattern(static_cast<int>(r), i, number))
            wrong_.fetch_add(1, std::memory_order_relaxed);
        }
      }
    });
    double value = 1.0;
    if (meeting == Meeting::kAllReduce) collectives_.all_reduce({&value, 1}, ReduceOp::kSum);
  }
  int wrong() {
    device_.compute_stream().synchronize();
    return wrong_.load();
  }

 private:
  static constexpr std::size_t kBytes = 3000;

  void exchange() {
    const auto numbers = numbers_->bytes();
    device_.fill_zero(numbers.first(sizeof(double)), device_.compute_stream());
    collectives_.all_gather_on_device(numbers.subspan(sizeof(double)),
                                      numbers.first(sizeof(double)));
  }

  Collectives& collectives_;
  device::LateDevice& device_;
  std::size_t world_;
  std::unique_ptr<SharedBuffer> slice_;
  std::unique_ptr<device::Memory> flat_;
  std::unique_ptr<device::Memory> numbers_;
  std::atomic<int> wrong_ = 0;
};

TEST_P(LateGathers, GiveTheValuesOfTheirRound) {
  constexpr int kWorld = 3;
  LocalGroup group(kWorld);
  std::vector<std::shared_ptr<device::LateDevice>> devices;
  for (int r = 0; r < kWorld; ++r) devices.push_back(late_device(r));
  const auto results = run_as_threads(
      kWorld,
      [&](int rank) {
        return make_peer_collectives(devices[static_cast<std::size_t>(rank)], group.rank(rank));
      },
      [&](Collectives& c) {
        Gathering gathering(c, *devices[static_cast<std::size_t>(c.rank())]);
        for (int round = 0; round < 40; ++round) gathering.round(round, GetParam());
        const int wrong = gathering.wrong();
        c.barrier();
        return wrong == 0 ? std::string() : fmt::format("{} bytes are wrong", wrong);
      });
  EXPECT_THAT(results, testing::Each(""));
}

INSTANTIATE_TEST_SUITE_P(Meetings, LateGathers,
                         testing::Values(Meeting::kAllReduce, Meeting::kExchange));

}  // namespace
}  // namespace strata::comm::conformance
