// Gathers of slices that change again and again, on devices whose streams run late: an update waits
// until peers have read the values before it, and a gather waits until the new values are there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>

#include "comm/conformance_ranks.h"
#include "comm/late_ranks.h"
#include "strata/comm/host/host_collectives.h"

namespace strata::comm::conformance {
namespace {

// The sync point of all ranks before slices change. kAllReduce: a rank reaches it after it has
// waited for its gather. kExchange: the device reaches it, after the rank has started its gather.
enum class SyncPoint { kAllReduce, kExchange };

class LateGathers : public testing::TestWithParam<SyncPoint> {};

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

  void round(int number, SyncPoint meeting) {
    device::Stream& compute = device_.compute_stream();
    device_.enqueue(compute, [slice = slice_->local(), rank = collectives_.rank(), number] {
      fill(slice, rank, number);
    });
    collectives_.barrier();
    const auto gather =
        collectives_.all_gather({slice_.get(), 0_B, 0_B, Bytes(kBytes)}, flat_->bytes(), "weights");
    if (meeting == SyncPoint::kExchange) exchange();
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
    if (meeting == SyncPoint::kAllReduce) collectives_.all_reduce({&value, 1}, ReduceOp::kSum);
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

// Runs `body` on three peers; it returns the number of wrong elements that it has read.
void expect_nothing_wrong(const std::function<int(Collectives&, device::LateDevice&)>& body) {
  constexpr int kWorld = 3;
  LocalGroup group(kWorld);
  std::vector<std::shared_ptr<device::LateDevice>> devices;
  for (int r = 0; r < kWorld; ++r) devices.push_back(late_device(r));
  const auto device = [&](int rank) { return devices[static_cast<std::size_t>(rank)]; };
  const auto results = run_as_threads(
      kWorld, [&](int rank) { return make_peer_collectives(device(rank), group.rank(rank)); },
      [&](Collectives& c) {
        const int wrong = body(c, *device(c.rank()));
        c.barrier();
        return wrong == 0 ? std::string() : fmt::format("{} values are wrong", wrong);
      });
  EXPECT_THAT(results, testing::Each(""));
}

TEST_P(LateGathers, GiveTheValuesOfTheirRound) {
  expect_nothing_wrong([](Collectives& c, device::LateDevice& device) {
    Gathering gathering(c, device);
    for (int round = 0; round < 40; ++round) gathering.round(round, GetParam());
    const int wrong = gathering.wrong();
    c.barrier();
    return wrong;
  });
}

INSTANTIATE_TEST_SUITE_P(Meetings, LateGathers,
                         testing::Values(SyncPoint::kAllReduce, SyncPoint::kExchange));

// Has a rank's transfers come after those of the others.
void work_long() {
  volatile std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < 300'000; ++i) sum = sum + i;
}

// A script writes slices so, between gathers and the next sync point of all ranks.
TEST(LateGatherRounds, WhenTheyAreFinishedSlicesMayBeWritten) {
  expect_nothing_wrong([](Collectives& c, device::LateDevice& device) {
    constexpr std::size_t kBytes = 3000;
    device::Stream& compute = device.compute_stream();
    const auto slice = c.allocate("weights", Bytes(kBytes));
    const auto flat = device.allocate(Bytes(kBytes) * c.world_size(), memory::Kind::kGathered);
    std::atomic<int> wrong = 0;
    for (int round = 0; round < 20; ++round) {
      device.enqueue(
          compute, [there = slice->local(), rank = c.rank(), round] { fill(there, rank, round); });
      c.barrier();
      if (round % c.world_size() == c.rank())
        device.enqueue(*c.stream(Traffic::kGathers), work_long);
      const auto gather =
          c.all_gather({slice.get(), 0_B, 0_B, Bytes(kBytes)}, flat->bytes(), "weights");
      const auto readers = c.finish_gathers();
      readers->wait();
      readers->wait();
      device.enqueue(compute,
                     [there = slice->local()] { std::ranges::fill(there, std::byte(255)); });
      gather->wait();
      device.enqueue(compute, [&wrong, all = flat->bytes(), world = c.world_size(), round] {
        for (std::size_t i = 0; i < all.size(); ++i) {
          const auto rank = static_cast<int>(i / kBytes);
          if (rank < world && all[i] != pattern(rank, i % kBytes, round)) wrong.fetch_add(1);
        }
      });
      compute.synchronize();
      if (!readers->done()) wrong.fetch_add(1);
      double value = 1.0;
      c.all_reduce({&value, 1}, ReduceOp::kSum);
    }
    return wrong.load();
  });
}

// The memory is one that only devices reach; the bytes go by way of the host, or without it.
TEST(LateBroadcasts, GiveTheRootsValuesOfTheirRound) {
  expect_nothing_wrong([](Collectives& c, device::LateDevice& device) {
  // Not under ThreadSanitizer: more than a piece.
#ifdef __SANITIZE_THREAD__
    constexpr std::size_t kMost = 300'000;
#else
    constexpr std::size_t kMost = 34'000'000;
#endif
    constexpr std::size_t kSizes[] = {3000, 300'000, 300'000, kMost};
    const auto memory = device.allocate(Bytes(kMost), memory::Kind::kStaging);
    std::atomic<int> wrong = 0;
    for (int round = 0; round < 8; ++round) {
      const auto bytes = memory->bytes().first(kSizes[round % 4]);
      const int root = round % c.world_size();
      device.enqueue(device.compute_stream(), [bytes, rank = c.rank(), round] {
        fill(bytes, rank, round);  // fills also the bytes that the broadcast replaces
      });
      c.broadcast(bytes, root);
      device.enqueue(device.compute_stream(), [&wrong, bytes, root, round] {
        for (std::size_t i = 0; i < bytes.size(); ++i) {
          if (bytes[i] != pattern(root, i, round)) wrong.fetch_add(1, std::memory_order_relaxed);
        }
      });
    }
    device.compute_stream().synchronize();
    return wrong.load();
  });
}

// Small whole numbers: every order of adding gives the same.
float late_contribution(int rank, std::size_t index, int round) {
  return static_cast<float>(rank + 1 + round) + static_cast<float>(index % 7);
}

// Reads the result of a reduction in shared memory, and gathers it, with only the barrier in
// between. Returns the number of wrong elements.
int read_what_is_reduced(Collectives& c, device::LateDevice& device) {
  constexpr std::size_t kNumel = 500;
  constexpr Bytes kSlice(static_cast<std::int64_t>(kNumel * sizeof(float)));
  const auto source = c.allocate("gradients", kSlice * c.world_size());
  const auto slice = c.allocate("weights", kSlice);
  const auto flat = device.allocate(kSlice * c.world_size(), memory::Kind::kGathered);
  const std::span<const float> gathered(reinterpret_cast<const float*>(flat->bytes().data()),
                                        source->local().size() / sizeof(float));
  std::atomic<int> wrong = 0;
  const auto check = [&](std::span<const float> sums, std::size_t first, int round) {
    device.enqueue(device.compute_stream(), [&wrong, sums, first, round, world = c.world_size()] {
      for (std::size_t i = 0; i < sums.size(); ++i) {
        float wanted = 0.0F;
        for (int r = 0; r < world; ++r) wanted += late_contribution(r, first + i, round);
        if (sums[i] != wanted) wrong.fetch_add(1, std::memory_order_relaxed);
      }
    });
  };
  for (int round = 0; round < 20; ++round) {
    if (round % c.world_size() == c.rank())
      device.enqueue(*c.stream(Traffic::kReductions), work_long);
    device.enqueue(device.compute_stream(), [there = floats_of(*source), rank = c.rank(), round] {
      for (std::size_t i = 0; i < there.size(); ++i) there[i] = late_contribution(rank, i, round);
    });
    Reduction reduction;
    reduction.source = source.get();
    reduction.result = floats_of(*slice);
    const auto reducing = c.reduce_scatter(reduction, "unit");
    c.barrier();
    check(floats_of(*slice), kNumel * static_cast<std::size_t>(c.rank()), round);
    c.all_gather({slice.get(), 0_B, 0_B, kSlice}, flat->bytes(), "weights")->wait();
    check(gathered, 0, round);
    reducing->wait();
    double value = 1.0;
    c.all_reduce({&value, 1}, ReduceOp::kSum);
  }
  device.compute_stream().synchronize();
  c.barrier();
  return wrong.load();
}

TEST(LateBarrier, ComesAfterReductionsThatNobodyHasWaitedFor) {
  expect_nothing_wrong(read_what_is_reduced);
}

}  // namespace
}  // namespace strata::comm::conformance
