#include "strata/io/striped_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/io/thread_engine.h"

namespace strata::testing {
namespace {

using ::testing::HasSubstr;

class StripedFile : public ::testing::Test {
 protected:
  std::vector<io::StripePart> parts(const std::vector<double>& speeds) {
    std::vector<io::StripePart> made;
    for (const double speed : speeds) {
      made.push_back({io::File(path(made.size()), io::File::Mode::kCreate), speed});
    }
    return made;
  }
  std::string path(std::size_t part) { return folder_ / ("part" + std::to_string(part)); }

  TemporaryFolder folder_;
  io::ThreadEngine io_{{.threads = 2, .piece = 64_B}};
};

TEST_F(StripedFile, GivesBackWhatWasWrittenWhereverItLies) {
  constexpr std::size_t kBytes = 5000;
  const io::StripedFile striped(parts({1, 2.5, 0.7}), Bytes(kBytes), 96_B);
  std::vector<std::byte> expected(kBytes);
  std::mt19937 random(3);
  for (unsigned round = 0; round < 200; ++round) {
    const std::size_t offset = random() % kBytes;
    const std::size_t bytes = random() % (kBytes - offset + 1);
    const auto source = patterned_bytes(bytes, round);
    std::ranges::copy(source, expected.begin() + static_cast<std::ptrdiff_t>(offset));
    striped.write(io_, Bytes(offset), source)->wait();
    std::vector<std::byte> target(kBytes);
    striped.read(io_, 0_B, target)->wait();
    ASSERT_EQ(target, expected);
  }
}

TEST_F(StripedFile, GivesFasterDrivesMore) {
  const io::StripedFile striped(parts({3000, 1000}), 8000_B, 10_B);
  EXPECT_EQ(striped.share_of(0), 6000_B);
  EXPECT_EQ(striped.share_of(1), 2000_B);
  const io::StripedFile three(parts({1, 1, 1}), 95_B, 10_B);
  EXPECT_EQ(three.share_of(0), 40_B);
  EXPECT_EQ(three.share_of(2), 30_B);
  const io::StripedFile slow(parts({1000, 1}), 1700_B, 10_B);
  EXPECT_EQ(slow.share_of(1), 100_B) << "a part that is very slow has its place all the same";
}

TEST_F(StripedFile, EveryByteLiesOnceAndTheSpaceIsTaken) {
  const auto source = patterned_bytes(1000, 2);
  const io::StripedFile striped(parts({2, 1}), 1000_B, 10_B);
  EXPECT_EQ(std::filesystem::file_size(path(0)), striped.share_of(0).size());
  EXPECT_EQ(std::filesystem::file_size(path(1)), striped.share_of(1).size());
  EXPECT_EQ(striped.share_of(0) + striped.share_of(1), 1000_B);
  striped.write(io_, 0_B, source)->wait();
  std::string together = content_of(path(0)) + content_of(path(1));
  std::string written(reinterpret_cast<const char*>(source.data()), source.size());
  std::ranges::sort(together);
  std::ranges::sort(written);
  EXPECT_EQ(together, written);
}

TEST_F(StripedFile, OneFileIsThatFile) {
  const auto source = patterned_bytes(777, 2);
  const io::StripedFile striped(parts({1}), 777_B, 10_B);
  const auto transfer = striped.write(io_, 0_B, source);
  transfer->wait();
  EXPECT_TRUE(transfer->done());
  EXPECT_EQ(content_of(path(0)).substr(0, 777),
            std::string(reinterpret_cast<const char*>(source.data()), source.size()));
}

TEST_F(StripedFile, AFailureNamesTheFileAndThePlace) {
  const io::StripedFile striped(parts({1, 1}), 100_B, 10_B);
  std::filesystem::resize_file(path(1), 25);
  std::vector<std::byte> target(100);
  const auto transfer = striped.read(io_, 0_B, target);
  const std::string message = message_of<IoError>([&] { transfer->wait(); });
  EXPECT_THAT(message, HasSubstr("path=" + path(1) + " offset=20 wanted=10 got=5"));
  EXPECT_EQ(message_of<IoError>([&] { transfer->wait(); }), message);
}

TEST_F(StripedFile, RefusesWhatCannotBeMeant) {
  const io::StripedFile striped(parts({1, 1}), 100_B, 10_B);
  std::vector<std::byte> target(11);
  EXPECT_THAT(message_of<UsageError>([&] { striped.read(io_, 90_B, target); }),
              HasSubstr("offset=90 bytes=11 size=100"));
  EXPECT_THROW(striped.write(io_, Bytes(-1), target), UsageError);
  EXPECT_NO_THROW(striped.read(io_, 100_B, {})->wait());
  EXPECT_THROW(io::StripedFile({}, 1_B, 1_B), UsageError);
  EXPECT_THROW(io::StripedFile(parts({1, 0}), 1_B, 1_B), UsageError);
  EXPECT_THROW(io::StripedFile(parts({1}), 1_B, 0_B), UsageError);
}

}  // namespace
}  // namespace strata::testing
