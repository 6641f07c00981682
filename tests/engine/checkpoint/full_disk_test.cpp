// A disk without room, and one that is read-only: every rank gets the error before a byte is
// written, and the checkpoint before stays, whichever way the next one is saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>

#include "engine/checkpoint/saving_ways.h"
#include "io/forwarding_calls.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/engine/checkpoint/training_loader.h"

namespace strata::engine {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::SavingWay;
using testing::TrainedRank;
using ::testing::UnorderedElementsAre;

// The requests that a disk refuses.
struct Refusals {
  std::optional<Bytes> free = std::nullopt;  // no more is free
  std::string no_space_for = "none";         // files with this in their names
  bool read_only = false;
};

class RefusingCalls final : public testing::ForwardingCalls {
 public:
  explicit RefusingCalls(Refusals refusals) : refusals_(std::move(refusals)) {}

  void make_folder(const std::string& path) override {
    if (refusals_.read_only) throw IoError("cannot make a folder: " + errno_text(EROFS));
    ForwardingCalls::make_folder(path);
  }
  std::optional<Bytes> free_space(const std::string& folder) override {
    return refusals_.free ? refusals_.free : ForwardingCalls::free_space(folder);
  }
  void reserve(io::File& file, Bytes bytes) override {
    if (file.path().find(refusals_.no_space_for) != std::string::npos)
      throw IoError("cannot reserve space for " + file.path() + ": " + errno_text(ENOSPC));
    ForwardingCalls::reserve(file, bytes);
  }

 private:
  Refusals refusals_;
};

class CountingIo final : public io::IoEngine {
 public:
  std::string_view name() const override { return "counting"; }
  std::unique_ptr<io::Transfer> read(const io::File& file, Bytes offset,
                                     std::span<std::byte> target) override {
    return engine_.read(file, offset, target);
  }
  std::unique_ptr<io::Transfer> write(const io::File& file, Bytes offset,
                                      std::span<const std::byte> source) override {
    ++writes;
    return engine_.write(file, offset, source);
  }

  std::atomic<int> writes = 0;

 private:
  io::ThreadEngine engine_;
};

class FullDisk : public ::testing::TestWithParam<SavingWay> {
 protected:
  // Returns the message of the second save on every rank; the first checkpoint still loads.
  std::vector<std::string> told(const Refusals& refusals) {
    std::vector<std::string> messages(2);
    const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
      TrainedRank rank(ranks, DType::kBFloat16, 3);
      SaveRequest request;
      request.folder = folder_.path();
      request.tag = "before";
      rank.set_states(1);
      testing::save_by(GetParam(), rank, request, std::make_shared<io::ThreadEngine>(),
                       std::make_shared<io::FolderCalls>());
      rank.set_states(2);
      request.tag = "after";
      const auto io = std::make_shared<CountingIo>();
      const auto mine = static_cast<std::size_t>(ranks->rank());
      messages[mine] = testing::message_of<IoError>([&] {
        testing::save_by(GetParam(), rank, request, io, std::make_shared<RefusingCalls>(refusals));
      });
      if (ranks->rank() == 1) {
        EXPECT_EQ(io->writes, 0);
      }
      io::ThreadEngine reading;
      load_training(*rank.engine, open_training(*ranks, folder_.path() + "/before"), {}, reading,
                    {3, 1_MiB});
      EXPECT_EQ(rank.wrong_states(1), "");
      ranks->barrier();
    });
    EXPECT_THAT(outcomes, Each(""));
    EXPECT_EQ(checkpoint::latest_tag(folder_.path()), "before");
    EXPECT_THAT(folder_.names(), UnorderedElementsAre(".strata.lock", "before", "latest"));
    return messages;
  }

  testing::TemporaryFolder folder_;
};

TEST_P(FullDisk, IsSeenByTheSumOfAllRanksFiles) {
  // One rank's files would fit.
  EXPECT_THAT(told({.free = 100'000_B}),
              Each(AllOf(HasSubstr("larger than what its file system has free"),
                         HasSubstr("wanted="), HasSubstr("free=100000"))));
}

TEST_P(FullDisk, IsFoundByTheLastFileBeforeAByteIsWritten) {
  EXPECT_THAT(told({.no_space_for = "optimizer-00001"}),
              Each(AllOf(HasSubstr("failed on rank 1"), HasSubstr("optimizer-00001"),
                         HasSubstr("errno=28"))));
}

TEST_P(FullDisk, OrOneThatMayOnlyBeReadIsSaidOnEveryRank) {
  EXPECT_THAT(told({.read_only = true}),
              Each(AllOf(HasSubstr("failed on rank 0"), HasSubstr("errno=30"))));
}

INSTANTIATE_TEST_SUITE_P(Ways, FullDisk,
                         ::testing::Values(SavingWay::kAtOnce, SavingWay::kBesideTraining),
                         testing::name_of);

}  // namespace
}  // namespace strata::engine
