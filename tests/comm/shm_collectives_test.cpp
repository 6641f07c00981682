#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "comm/collectives_conformance.h"
#include "comm/file_bootstrap.h"
#include "comm/scratch_directory.h"
#include "strata/comm/host/host_collectives.h"

namespace strata::comm::conformance {
namespace {

std::vector<std::string> run_shm(int world_size, std::chrono::milliseconds timeout,
                                 const RankBody& body) {
  const ScratchDirectory directory;
  const auto make = [&](int rank) {
    FileBootstrap bootstrap(directory.path(), rank, world_size, std::chrono::seconds(30));
    CommOptions options;
    options.timeout = timeout;
    return make_shm_collectives(bootstrap, options);
  };
  return run_as_processes(world_size, make, body);
}

Backend shm_backend() {
  return {"shm", run_shm};
}

INSTANTIATE_TEST_SUITE_P(Shm, CollectivesMoveData, testing::Values(shm_backend()));
INSTANTIATE_TEST_SUITE_P(Shm, CollectivesReportErrors, testing::Values(shm_backend()));
INSTANTIATE_TEST_SUITE_P(Shm, OneSidedGathers, testing::Values(shm_backend()));

std::size_t files_in_dev_shm() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

// Runs three ranks, and kills rank 1; returns every rank's report.
std::vector<std::string> run_with_a_death(const std::function<void(Collectives&)>& die,
                                          const std::function<void(Collectives&)>& survive) {
  return run_shm(3, std::chrono::minutes(30), [&](Collectives& c) {
    auto buffer = c.allocate("mine", 4096_B);
    c.barrier();
    try {
      c.rank() == 1 ? die(c) : survive(c);
    } catch (const CommError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  });
}

void kill_myself(Collectives&) {
  ::kill(::getpid(), SIGKILL);
}

TEST(ShmCollectives, NameARankThatWasKilledWhileOthersAreInABarrier) {
  const std::size_t before = files_in_dev_shm();
  const auto results = run_with_a_death(kill_myself, [](Collectives& c) { c.barrier(); });
  EXPECT_EQ(results[1], "died: signal 9");
  EXPECT_THAT(results[0], testing::HasSubstr("rank 1 is gone"));
  EXPECT_THAT(results[2], testing::HasSubstr("rank 1 is gone"));
  EXPECT_EQ(files_in_dev_shm(), before);
}

TEST(ShmCollectives, NameARankThatWasKilledInTheMiddleOfAReduction) {
  const auto reduce = [](Collectives& c) { reduce_once(c, 1 << 16, "layers.3"); };
  const auto results = run_with_a_death(
      [](Collectives& c) {
        auto source = c.allocate("source", Bytes(3 << 18));
        std::vector<float> result(1 << 16);
        auto work =
            c.reduce_scatter({source.get(), 0_B, DType::kFloat32, result, 1.0F, false}, "layers.3");
        kill_myself(c);
      },
      [&](Collectives& c) {
        // Whether the first one completes depends on how far the dead rank came; the second cannot.
        reduce(c);
        reduce(c);
      });
  EXPECT_THAT(results[0], testing::HasSubstr("rank 1 is gone"));
  EXPECT_THAT(results[2], testing::HasSubstr("rank 1 is gone"));
}

TEST(ShmCollectives, NameARankThatWasKilledBeforeItAllocatedABuffer) {
  const auto results = run_with_a_death(kill_myself, [](Collectives& c) {
    auto buffer = c.allocate("late", 16_B);
    std::vector<std::byte> flat(48);
    c.all_gather({buffer.get(), 0_B, 0_B, 16_B}, flat, "late")->wait();
  });
  EXPECT_THAT(results[0], testing::HasSubstr("rank 1 is gone"));
  EXPECT_THAT(results[2], testing::HasSubstr("'late'"));
}

// Bytes that all segments opened by this process hold: its own one and its peers'.
std::size_t bytes_in_segments() {
  std::size_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own descriptor
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    struct stat status {};
    if (gone || target.string().rfind("/memfd:strata", 0) != 0) continue;
    if (::stat(entry.path().c_str(), &status) == 0) {
      bytes += static_cast<std::size_t>(status.st_blocks) * 512;
    }
  }
  return bytes;
}

TEST(ShmCollectives, GiveFreedMemoryBackWhilePeersHaveItMapped) {
  const auto results = run_shm(2, std::chrono::seconds(60), [](Collectives& c) {
    const std::size_t bytes = std::size_t{8} << 20;
    std::vector<std::byte> flat(2 * bytes);
    for (int i = 0; i < 4; ++i) {
      auto buffer = c.allocate("large", Bytes(bytes));
      std::memset(buffer->local().data(), i + 1, bytes);
      c.barrier();
      c.all_gather({buffer.get(), 0_B, 0_B, Bytes(bytes)}, flat, "large")->wait();
      const std::size_t held = bytes_in_segments();
      require(held >= 2 * bytes && held < 3 * bytes, fmt::format("{} bytes held", held));
      c.barrier();
      buffer.reset();
      c.barrier();
      require(bytes_in_segments() < bytes, "freed memory was given back");
      c.barrier();
    }
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

TEST(ShmCollectives, RefuseToStartWhereOneRankIsAlone) {
  const ScratchDirectory directory;
  FileBootstrap bootstrap(directory.path(), 0, 2, std::chrono::milliseconds(50));
  EXPECT_THAT([&] { static_cast<void>(make_shm_collectives(bootstrap)); },
              testing::ThrowsMessage<CommError>(testing::HasSubstr("missing: 1 of 2")));
}

// Answers every exchange with the texts that the test gives as the peers'.
class ScriptedBootstrap final : public Bootstrap {
 public:
  explicit ScriptedBootstrap(std::string peer) : peer_(std::move(peer)) {}
  int rank() const override { return 0; }
  int world_size() const override { return 2; }
  std::vector<std::string> exchange(const std::string& text) override {
    const bool first = exchanges_++ == 0;
    return {text, first ? peer_ : std::string()};
  }

 private:
  std::string peer_;
  int exchanges_ = 0;
};

TEST(ShmCollectives, SayWhenAPeerIsOnAnotherHost) {
  ScriptedBootstrap bootstrap(R"({"host":"elsewhere","pid":1,"fd":3,"key":7})");
  EXPECT_THAT([&] { static_cast<void>(make_shm_collectives(bootstrap)); },
              testing::ThrowsMessage<CommError>(testing::HasSubstr("rank 1 is on another one")));
}

TEST(ShmCollectives, SayWhenAPeerBuildsSomethingElse) {
  ScriptedBootstrap bootstrap("hello");
  EXPECT_THAT([&] { static_cast<void>(make_shm_collectives(bootstrap)); },
              testing::ThrowsMessage<CommError>(testing::HasSubstr("same kind of collectives")));
}

}  // namespace
}  // namespace strata::comm::conformance
