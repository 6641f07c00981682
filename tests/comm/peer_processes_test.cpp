// Peer collectives of ranks that are processes.
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include "comm/collectives_conformance.h"
#include "comm/file_bootstrap.h"
#include "comm/scratch_directory.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/device/cpu_device.h"

namespace strata::comm::conformance {
namespace {

std::vector<std::string> run_peer_processes(int world_size, std::chrono::milliseconds timeout,
                                            const RankBody& body) {
  const ScratchDirectory directory;
  const auto make = [&](int rank) {
    FileBootstrap bootstrap(directory.path(), rank, world_size, std::chrono::seconds(30));
    CommOptions options;
    options.timeout = timeout;
    return make_peer_collectives(std::make_shared<device::CpuDevice>(),
                                 make_shm_collectives(bootstrap, options), options);
  };
  return run_as_processes(world_size, make, body);
}

Backend peer_process_backend() {
  return {"peer_processes", run_peer_processes};
}

INSTANTIATE_TEST_SUITE_P(PeerProcesses, CollectivesMoveData,
                         testing::Values(peer_process_backend()));
INSTANTIATE_TEST_SUITE_P(PeerProcesses, CollectivesReportErrors,
                         testing::Values(peer_process_backend()));
INSTANTIATE_TEST_SUITE_P(PeerProcesses, OneSidedGathers, testing::Values(peer_process_backend()));

// Rank 1 is killed; the others only gather, which needs no word of it.
TEST(PeerProcesses, NoticeADeathWithoutAnOperationThatMeetsTheDead) {
  const auto results = run_peer_processes(3, std::chrono::minutes(30), [](Collectives& c) {
    auto buffer = c.allocate("mine", 4096_B);
    c.barrier();
    if (c.rank() == 1) ::kill(::getpid(), SIGKILL);
    std::vector<std::byte> flat(3 * 4096);
    try {
      for (;;) c.all_gather({buffer.get(), 0_B, 0_B, 4096_B}, flat, "mine")->wait();
    } catch (const CommError& error) {
      return std::string(error.what());
    }
  });
  EXPECT_THAT(results[0], testing::HasSubstr("rank 1"));
  EXPECT_THAT(results[2], testing::HasSubstr("rank 1"));
}

// Rank 1 agrees to a reduction and is killed before its contribution is there: the others wait for
// its flag.
TEST(PeerProcesses, ADeathEndsTheWaitForAFlag) {
  const auto results = run_peer_processes(3, std::chrono::minutes(30), [](Collectives& c) {
    auto buffer = c.allocate("mine", Bytes(3 * 4096));
    c.barrier();
    std::vector<float> result(1024);
    for (int i = 0;; ++i) {
      if (c.rank() == 1 && i == 100) ::kill(::getpid(), SIGKILL);
      try {
        c.reduce_scatter({buffer.get(), 0_B, DType::kFloat32, result, 1.0F, false}, "mine")->wait();
      } catch (const CommError& error) {
        return std::string(error.what());
      }
    }
  });
  EXPECT_THAT(results[0], testing::HasSubstr("rank 1"));
  EXPECT_THAT(results[2], testing::HasSubstr("rank 1"));
}

// Stops its process where it would tell its peers that it has written its contribution.
class StoppingDevice final : public device::CpuDevice {
 public:
  explicit StoppingDevice(const bool& stops) : stops_(stops) {}
  void write_flag(device::Flag& flag, std::uint32_t value, device::Stream& stream) override {
    if (stops_) ::raise(SIGSTOP);
    CpuDevice::write_flag(flag, value, stream);
  }

 private:
  const bool& stops_;
};

TEST(PeerProcesses, AStoppedRankIsNamedAtTheTimeoutByWhoWaitsForItsFlag) {
  const ScratchDirectory directory;
  int ended[2];  // rank 1 writes it when it goes on
  ASSERT_EQ(::pipe(ended), 0);
  bool stops = false;  // each process has its own
  const auto make = [&](int rank) {
    FileBootstrap bootstrap(directory.path(), rank, 2, std::chrono::seconds(30));
    return make_peer_collectives(std::make_shared<StoppingDevice>(stops),
                                 make_shm_collectives(bootstrap, {}),
                                 {.timeout = std::chrono::seconds(1)});
  };
  const auto results = run_as_processes(2, make, [&](Collectives& c) {
    auto buffer = c.allocate("mine", Bytes(2 * 4096));
    const auto processes = c.all_gather_text(std::to_string(::getpid()));
    std::vector<float> result(1024);
    std::string message = "no error";
    const Reduction reduction{buffer.get(), 0_B, DType::kFloat32, result, 1.0F, false};
    c.reduce_scatter(reduction, "mine")->wait();  // each has mapped the other's buffer
    stops = c.rank() == 1;
    try {
      c.reduce_scatter(reduction, "mine")->wait();
    } catch (const CommError& error) {
      message = error.what();
    }
    stops = false;
    if (c.rank() == 1) {
      if (::write(ended[1], "x", 1) != 1) message += "; the other rank was not told";
      return message;
    }
    // It may stop only now.
    pollfd waiting{ended[0], POLLIN, 0};
    do {
      ::kill(std::stoi(processes[1]), SIGCONT);
    } while (::poll(&waiting, 1, 10) == 0);
    return message;
  });
  ::close(ended[0]);
  ::close(ended[1]);
  // Rank 1 hears of it, or ends its reduction before it does.
  EXPECT_THAT(results[0], testing::AllOf(testing::HasSubstr("rank 1 lives but does not come"),
                                         testing::HasSubstr("its part of a reduction"),
                                         testing::HasSubstr("1000 ms")));
}

}  // namespace
}  // namespace strata::comm::conformance
