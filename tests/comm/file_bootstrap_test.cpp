#include "comm/file_bootstrap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <thread>

#include "comm/scratch_directory.h"
#include "strata/base/error.h"

namespace strata::comm {
namespace {

using conformance::ScratchDirectory;

TEST(FileBootstrap, ExchangesTextsInRounds) {
  const ScratchDirectory directory;
  std::vector<std::thread> threads;
  std::vector<int> good(4, 0);
  for (int r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      FileBootstrap bootstrap(directory.path(), r, 4);
      for (int round = 0; round < 5; ++round) {
        const auto text_of = [&](int rank) {
          return rank == 2 ? std::string() : "round " + std::to_string(round * 10 + rank);
        };
        const auto texts = bootstrap.exchange(text_of(r));
        if (texts == std::vector{text_of(0), text_of(1), text_of(2), text_of(3)}) {
          ++good[static_cast<std::size_t>(r)];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(good, testing::Each(5));
  // Only the last round's files remain, and no temporary ones.
  const auto left = std::filesystem::directory_iterator(directory.path());
  EXPECT_EQ(std::distance(begin(left), end(left)), 4);
}

TEST(FileBootstrap, NamesTheRanksThatDoNotCome) {
  const ScratchDirectory directory;
  FileBootstrap bootstrap(directory.path(), 1, 4, std::chrono::milliseconds(30));
  EXPECT_THAT([&] { bootstrap.exchange("here"); },
              testing::ThrowsMessage<CommError>(testing::HasSubstr("missing: 0, 2, 3 of 4")));
}

TEST(FileBootstrap, RefusesADirectoryOfAnotherStart) {
  const ScratchDirectory directory;
  FileBootstrap(directory.path(), 0, 1).exchange("first start");
  FileBootstrap second(directory.path(), 0, 1);
  EXPECT_THAT([&] { second.exchange("second start"); },
              testing::ThrowsMessage<CommError>(testing::HasSubstr("an empty one")));
}

TEST(FileBootstrap, FollowsNoLinkThatLiesWhereATemporaryMightBe) {
  const ScratchDirectory directory;
  const ScratchDirectory elsewhere;
  std::ofstream(elsewhere.path() / "victim") << "precious";
  const std::string name = "exchange-0-rank-0-of-1";
  for (const std::string& end : {"." + std::to_string(::getpid()), std::string(".partial")})
    std::filesystem::create_symlink(elsewhere.path() / "victim", directory.path() / (name + end));
  EXPECT_EQ(FileBootstrap(directory.path(), 0, 1).exchange("mine"),
            std::vector{std::string("mine")});
  std::ifstream victim(elsewhere.path() / "victim");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(victim), {}), "precious");
  EXPECT_FALSE(std::filesystem::is_symlink(directory.path() / name));
}

TEST(FileBootstrap, RefusesAPathThatIsAFile) {
  const ScratchDirectory directory;
  std::ofstream(directory.path() / "file") << "x";
  EXPECT_THROW(FileBootstrap(directory.path() / "file", 0, 1), IoError);
  EXPECT_THROW(FileBootstrap(directory.path(), 2, 2), UsageError);
}

}  // namespace
}  // namespace strata::comm
