#include "strata/comm/peer/peer_collectives.h"

#include <atomic>
#include <functional>

#include "comm/collectives_conformance.h"
#include "comm/late_ranks.h"
#include "device/limited_device.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/device/cpu_device.h"

namespace strata::comm::conformance {
namespace {

// Ranks are threads; their "devices" share memory by files, and wait for flags in the call.
std::vector<std::string> run_peers(int world_size, std::chrono::milliseconds timeout,
                                   const RankBody& body) {
  CommOptions options;
  options.timeout = timeout;
  LocalGroup group(world_size, options);
  return run_as_threads(
      world_size,
      [&](int rank) {
        return make_peer_collectives(std::make_shared<device::CpuDevice>(), group.rank(rank),
                                     options);
      },
      body);
}

Backend peer_backend() {
  return {"peer", run_peers};
}

// The same, with streams that run late.
Backend late_peer_backend() {
  return {"late_peer", [](int world_size, std::chrono::milliseconds timeout, const RankBody& body) {
            CommOptions options;
            options.timeout = timeout;
            LocalGroup group(world_size, options);
            const auto make = [&](int rank) -> std::unique_ptr<Collectives> {
              const auto device = late_device(rank);
              return std::make_unique<HostResults>(
                  make_peer_collectives(device, group.rank(rank), options), device);
            };
            return run_as_threads(world_size, make, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(Peer, CollectivesMoveData,
                         testing::Values(peer_backend(), late_peer_backend()));
INSTANTIATE_TEST_SUITE_P(Peer, CollectivesReportErrors,
                         testing::Values(peer_backend(), late_peer_backend()));
INSTANTIATE_TEST_SUITE_P(Peer, OneSidedGathers,
                         testing::Values(peer_backend(), late_peer_backend()));

std::vector<std::string> on_peers(int world_size, const RankBody& body) {
  return run_peers(world_size, std::chrono::seconds(60), body);
}

// A clock that counts the operations of its device.
class OperationTime final : public device::TimedEvent {
 public:
  explicit OperationTime(int operations) : operations_(operations) {}
  bool done() override { return true; }
  void wait() override {}
  double seconds_since(device::TimedEvent& earlier) override {
    return operations_ - dynamic_cast<OperationTime&>(earlier).operations_;
  }

 private:
  int operations_;
};

class OperationStream final : public device::Stream {
 public:
  OperationStream(const int& operations, std::unique_ptr<device::Stream> stream)
      : operations_(operations), stream_(std::move(stream)) {}
  std::unique_ptr<device::Event> record() override { return stream_->record(); }
  std::unique_ptr<device::TimedEvent> record_timed() override {
    return std::make_unique<OperationTime>(operations_);
  }
  void wait_for(device::Event& event) override { stream_->wait_for(event); }
  void synchronize() override { stream_->synchronize(); }

 private:
  const int& operations_;
  const std::unique_ptr<device::Stream> stream_;
};

// Times on it say how many copies, sums and flags lay between.
class OperationClock final : public device::CpuDevice {
 public:
  std::unique_ptr<device::Stream> create_stream() override {
    return std::make_unique<OperationStream>(operations_, CpuDevice::create_stream());
  }
  device::Stream& compute_stream() override { return compute_; }
  void copy(std::span<std::byte> target, std::span<const std::byte> source,
            device::Stream& stream) override {
    ++operations_;
    CpuDevice::copy(target, source, stream);
  }
  void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                    float scale, bool accumulate, device::Stream& stream) override {
    ++operations_;
    CpuDevice::sum_in_order(target, sources, dtype, scale, accumulate, stream);
  }
  void write_flag(device::Flag& flag, std::uint32_t value, device::Stream& stream) override {
    ++operations_;
    CpuDevice::write_flag(flag, value, stream);
  }
  void wait_flag(const device::Flag& flag, std::uint32_t value, device::Stream& stream) override {
    ++operations_;
    CpuDevice::wait_flag(flag, value, stream);
  }

 private:
  int operations_ = 0;
  OperationStream compute_{operations_, CpuDevice::create_stream()};
};

TEST(PeerCollectives, KnowWhenBytesMovedWhereTheyAreAsked) {
  constexpr int kWorld = 3;
  LocalGroup group(kWorld);
  const auto make = [&](int rank) {
    return make_peer_collectives(std::make_shared<OperationClock>(), group.rank(rank));
  };
  const auto results = run_as_threads(kWorld, make, [](Collectives& c) {
    constexpr std::size_t kNumel = 1000;
    auto shared = c.allocate("shared", Bytes(kNumel * 4 * kWorld));
    std::vector<std::byte> flat(kNumel * 4 * kWorld);
    std::vector<float> result(kNumel);
    const SliceMap slices{shared.get(), 0_B, 0_B, Bytes(kNumel * 4)};
    const Reduction reduction{shared.get(), 0_B, DType::kFloat32, result, 1.0F, false};
    c.barrier();
    const auto silent = c.all_gather(slices, flat, "silent");
    require(silent->times().begin == nullptr, "who is not asked records nothing");
    silent->wait();
    c.record_times(true);
    const auto gather = c.all_gather(slices, flat, "gather");
    gather->wait();
    const WorkTimes gathered = gather->times();
    require(gathered.end->seconds_since(*gathered.begin) == kWorld,
            "all copies of a gather lie between its begin and its end");
    const auto reduce = c.reduce_scatter(reduction, "reduce");
    reduce->wait();
    const WorkTimes reduced = reduce->times();
    require(reduced.begin->seconds_since(*reduced.ready) == 2 * (kWorld - 1),
            "a reduction begins when this rank has told its peers and has heard from them");
    require(reduced.end->seconds_since(*reduced.begin) > kWorld - 1,
            "a reduction ends when its sums are there and its peers were told");
    c.barrier();
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

// Counts the copies that the collectives make.
class CountingDevice final : public device::CpuDevice {
 public:
  void copy(std::span<std::byte> target, std::span<const std::byte> source,
            device::Stream& stream) override {
    ++copies;
    bytes += Bytes(target.size());
    CpuDevice::copy(target, source, stream);
  }
  int copies = 0;
  Bytes bytes;
};

std::vector<std::string> on_counting_devices(
    int world_size, const std::function<std::string(Collectives&, CountingDevice&)>& body) {
  LocalGroup group(world_size);
  std::vector<std::shared_ptr<CountingDevice>> devices;
  for (int r = 0; r < world_size; ++r) devices.push_back(std::make_shared<CountingDevice>());
  const auto device_of = [&](int rank) { return devices[static_cast<std::size_t>(rank)]; };
  return run_as_threads(
      world_size,
      [&](int rank) { return make_peer_collectives(device_of(rank), group.rank(rank)); },
      [&](Collectives& c) { return body(c, *device_of(c.rank())); });
}

TEST(PeerCollectives, AReductionCopiesNothing) {
  constexpr int kWorld = 3;
  constexpr std::size_t kNumel = 5000;
  const auto results = on_counting_devices(kWorld, [](Collectives& c, CountingDevice& device) {
    auto source = c.allocate("source", Bytes(kNumel * 4 * kWorld));
    std::vector<float> result(kNumel);
    const int before = device.copies;
    c.reduce_scatter({source.get(), 0_B, DType::kFloat32, result, 1.0F, false}, "sum")->wait();
    require(device.copies == before, "peers' contributions are read where they are");
    c.barrier();
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

TEST(PeerCollectives, AGatherCopiesEachPeersSliceOnceAndNothingElse) {
  constexpr int kWorld = 3;
  constexpr std::size_t kSlice = 5000;
  const auto results = on_counting_devices(kWorld, [&](Collectives& c, CountingDevice& device) {
    auto sharded = c.allocate("sharded", Bytes(kSlice));
    auto whole = c.allocate("whole", Bytes(kSlice * kWorld));
    std::vector<std::byte> flat(kSlice * kWorld);
    c.barrier();
    const auto counted = [&](const SliceMap& slices, std::span<std::byte> target) {
      device.copies = 0;
      device.bytes = Bytes();
      c.all_gather(slices, target, "unit")->wait();
      return std::pair(device.copies, device.bytes.size());
    };
    require(counted({sharded.get(), 0_B, 0_B, Bytes(kSlice)}, flat) ==
                std::pair(kWorld, kSlice * kWorld),
            "a sharded unit: every slice once, this rank's own, too");
    require(counted({whole.get(), 0_B, Bytes(kSlice), Bytes(kSlice)}, whole->local()) ==
                std::pair(kWorld - 1, kSlice * (kWorld - 1)),
            "a unit that stays whole: the peers' slices, in place");
    c.barrier();
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

TEST(PeerCollectives, GatherFromABufferThatGrowsWhileItIsMapped) {
  const auto results = on_peers(2, [](Collectives& c) {
    constexpr std::size_t kHalf = 1 << 20;
    auto buffer = c.allocate_growing("weights", Bytes(2 * kHalf));
    for (std::size_t half = 0; half < 2; ++half) {
      buffer->back(Bytes((half + 1) * kHalf));
      fill(buffer->local().subspan(half * kHalf, kHalf), c.rank(), static_cast<int>(half));
      c.barrier();
      std::vector<std::byte> flat(2 * kHalf);
      c.all_gather({buffer.get(), Bytes(half * kHalf), 0_B, Bytes(kHalf)}, flat, "half")->wait();
      for (int r = 0; r < 2; ++r) {
        require_pattern(std::span(flat).subspan(static_cast<std::size_t>(r) * kHalf, kHalf), r,
                        "gather", static_cast<int>(half));
      }
    }
    c.barrier();
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

TEST(PeerCollectives, SeeTheNewBufferWhereANameIsUsedAgain) {
  const auto results = on_peers(3, [](Collectives& c) {
    for (int round = 0; round < 4; ++round) {
      auto buffer = c.allocate("weights", Bytes(3000 + round * 5000));
      fill(buffer->local(), c.rank(), round);
      c.barrier();
      const std::size_t bytes = buffer->local().size();
      std::vector<std::byte> flat(bytes * 3);
      c.all_gather({buffer.get(), 0_B, 0_B, Bytes(bytes)}, flat, "weights")->wait();
      for (int r = 0; r < 3; ++r) {
        require_pattern(std::span(flat).subspan(static_cast<std::size_t>(r) * bytes, bytes), r,
                        "gather", round);
      }
      c.barrier();
    }
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

// Notes how many ranks have pinned their flags before it does.
class PinsInTurn final : public device::CpuDevice {
 public:
  explicit PinsInTurn(std::atomic<int>& pinned) : pinned_(pinned) {}
  std::unique_ptr<device::HostRegistration> pin(std::span<std::byte> host) override {
    before_ = pinned_.load();
    auto registration = CpuDevice::pin(host);
    pinned_.fetch_add(1);
    return registration;
  }
  int before() const { return before_; }

 private:
  std::atomic<int>& pinned_;
  int before_ = -1;
};

TEST(PeerCollectives, PinTheFlagsOnTheFirstRankBeforeOthersDo) {
  constexpr int kWorld = 4;
  LocalGroup group(kWorld);
  std::atomic<int> pinned = 0;
  std::vector<std::shared_ptr<PinsInTurn>> devices;
  for (int r = 0; r < kWorld; ++r) devices.push_back(std::make_shared<PinsInTurn>(pinned));
  const auto make = [&](int rank) {
    return make_peer_collectives(devices[static_cast<std::size_t>(rank)], group.rank(rank), {});
  };
  const auto results = run_as_threads(kWorld, make, [](Collectives&) { return std::string(); });
  EXPECT_THAT(results, testing::Each(""));
  EXPECT_EQ(devices[0]->before(), 0);
  for (int r = 1; r < kWorld; ++r) EXPECT_GT(devices[static_cast<std::size_t>(r)]->before(), 0);
}

TEST(PeerCollectives, LeaveTheirControlPlaneUsableWhereARankCannotTakePart) {
  LocalGroup group(2);
  const auto results = run_as_threads(
      2, [&](int rank) { return group.rank(rank); },
      [](Collectives& c) {
        const std::shared_ptr<Collectives> control(&c, [](Collectives*) {});
        const Bytes limit = c.rank() == 1 ? 1_B : 1_GiB;
        std::string message = "no error";
        try {
          make_peer_collectives(std::make_shared<device::LimitedDevice>(limit), control);
        } catch (const CommError& error) {
          message = error.what();
        }
        c.barrier();
        return message;
      });
  EXPECT_THAT(results, testing::Each(testing::AllOf(testing::HasSubstr("rank 1"),
                                                    testing::HasSubstr("is out of memory"))));
}

}  // namespace
}  // namespace strata::comm::conformance
