// Reading in pieces: whatever the sizes of pieces and blocks, all bytes come once and in order, and
// every block that is wrong is named.
#include "strata/cli/checked_read.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "cli/saved_checkpoint.h"
#include "strata/base/error.h"
#include "strata/io/thread_engine.h"

namespace strata::cli {
namespace {

// A file of 1,000 bytes that counts.
class CheckedRead : public ::testing::Test {
 protected:
  CheckedRead() {
    std::iota(content_.begin(), content_.end(), '\0');
    write_text(folder_ / "f", content_);
  }

  // What comes of the ranges, and the wrong ranges.
  std::string read(Bytes block, std::vector<io::FileRange> ranges, Bytes buffer = 48_B) {
    format::BlockChecksums sums(block, {});
    sums.set(Bytes(), std::as_bytes(std::span(content_)));
    const std::vector<format::ManifestFile> files{{"f", Bytes(content_.size()), sums}};
    const io::File file(folder_ / "f", io::File::Mode::kRead);
    std::string came;
    CheckedReading reading;
    reading.files = {&file};
    reading.sums = files;
    reading.ranges = ranges;
    reading.take = [&](std::size_t, Bytes offset, std::span<const std::byte> bytes) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes.data()) % 16, offset.size() % 16);
      came.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    wrong_.clear();
    reading.wrong = [&](const WrongRange& range) { wrong_.push_back(range); };
    BufferRing ring({3, buffer}, nullptr);
    read_checked(reading, io_, ring);
    return came;
  }

  TestFolder folder_;
  std::string content_ = std::string(1000, '\0');
  std::vector<WrongRange> wrong_;
  io::ThreadEngine io_;
};

TEST_F(CheckedRead, GivesEveryByteOnceInOrder) {
  for (const Bytes block : {1_B, 7_B, 64_B, 1000_B, Bytes(INT64_MAX)}) {
    EXPECT_EQ(read(block, {{0, Bytes(), 1000_B}}), content_);
    EXPECT_EQ(read(block, {{0, 3_B, 10_B}, {0, 500_B, 500_B}}),
              content_.substr(3, 10) + content_.substr(500));
    EXPECT_TRUE(wrong_.empty());
  }
}

TEST_F(CheckedRead, NamesTheWrongBlock) {
  for (const Bytes block : {1_B, 7_B, 64_B, 999_B, 2000_B}) {
    for (const std::int64_t at : {0, 63, 500, 999}) {
      flip_byte(folder_ / "f", at);
      read(block, {{0, Bytes(), 1000_B}});
      ASSERT_EQ(wrong_.size(), 1U) << block.value << " " << at;
      EXPECT_EQ(wrong_[0].begin, Bytes(at) - Bytes(at) % block);
      EXPECT_EQ(wrong_[0].end, std::min(wrong_[0].begin + block, 1000_B));
      flip_byte(folder_ / "f", at);
    }
  }
}

TEST_F(CheckedRead, ChecksOnlyBlocksThatItReadWhole) {
  flip_byte(folder_ / "f", 70);
  read(64_B, {{0, 0_B, 100_B}, {0, 110_B, 100_B}});
  EXPECT_TRUE(wrong_.empty());
  read(64_B, {{0, 64_B, 64_B}});
  EXPECT_EQ(wrong_.size(), 1U);
}

TEST_F(CheckedRead, NamesWhatCannotBeRead) {
  std::filesystem::resize_file(folder_ / "f", 700);
  const std::string came = read(64_B, {{0, Bytes(), 1000_B}}, 128_B);
  EXPECT_EQ(came, content_.substr(0, came.size()));
  ASSERT_FALSE(wrong_.empty());
  EXPECT_LE(wrong_[0].begin, 700_B);
  EXPECT_EQ(wrong_.back().end, 1000_B);
  EXPECT_THAT(wrong_[0].problem, ::testing::HasSubstr("path="));
}

TEST(WholeBlocks, GrowToBlocksAndJoin) {
  const std::vector<format::ManifestFile> files{
      {"f", 1000_B, format::BlockChecksums(64_B, {})},
      {"g", 100_B, format::BlockChecksums(Bytes(INT64_MAX), {})}};
  const std::vector<io::FileRange> ranges{
      {0, 70_B, 10_B}, {0, 100_B, 60_B}, {0, 300_B, 20_B}, {0, 990_B, 5_B}, {1, 50_B, 1_B}};
  const auto blocks = whole_blocks(ranges, files);
  std::vector<std::array<std::int64_t, 3>> found;
  for (const io::FileRange& range : blocks)
    found.push_back({static_cast<std::int64_t>(range.file), range.offset.value, range.bytes.value});
  const std::vector<std::array<std::int64_t, 3>> wanted{
      {0, 64, 128}, {0, 256, 64}, {0, 960, 40}, {1, 0, 100}};
  EXPECT_EQ(found, wanted);
}

}  // namespace
}  // namespace strata::cli
