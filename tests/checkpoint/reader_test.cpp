// Reading in chunks: with any sizes of chunks and blocks, all bytes come once and in order, and the
// reader names every wrong block.
#include "strata/checkpoint/reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/io/thread_engine.h"

namespace strata::checkpoint {
namespace {

// A file of 1,000 bytes that counts.
class RangeReading : public ::testing::Test {
 protected:
  RangeReading() {
    std::iota(content_.begin(), content_.end(), '\0');
    folder_.write("f", content_);
  }

  // The bytes of the ranges; wrong ranges go to wrong_.
  std::string read(Bytes block, std::vector<FileRange> ranges, Bytes buffer = 48_B) {
    format::BlockChecksums sums(block, {});
    sums.set(Bytes(), std::as_bytes(std::span(content_)));
    const std::vector<format::ManifestFile> files{{"f", Bytes(content_.size()), sums}};
    const io::File file(folder_ / "f", io::File::Mode::kRead);
    struct Taken final : Sink {
      std::unique_ptr<io::Transfer> take(const Piece& piece) override {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece.content.data()) % 16,
                  piece.offset.size() % 16);
        came.append(reinterpret_cast<const char*>(piece.content.data()), piece.content.size());
        return nullptr;
      }
      std::string came;
    } taken;
    wrong_.clear();
    const ReadableFile way{&file, nullptr};
    const Verification verify{files, true,
                              [&](const WrongRange& range) { wrong_.push_back(range); }};
    TransferRing ring({3, buffer}, nullptr);
    RangeSource source({&way, 1}, ranges, io_, buffer, {.aligned = 16_B, .verify = &verify});
    copy(source, taken, ring);
    return taken.came;
  }

  void flip(std::int64_t at) {
    std::fstream file(folder_ / "f", std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(at);
    file.put(byte);
  }

  testing::TemporaryFolder folder_;
  std::string content_ = std::string(1000, '\0');
  std::vector<WrongRange> wrong_;
  io::ThreadEngine io_;
};

TEST_F(RangeReading, GivesEveryByteOnceInOrder) {
  for (const Bytes block : {1_B, 7_B, 64_B, 1000_B, Bytes(INT64_MAX)}) {
    EXPECT_EQ(read(block, {{0, Bytes(), 1000_B}}), content_);
    EXPECT_EQ(read(block, {{0, 3_B, 10_B}, {0, 500_B, 500_B}}),
              content_.substr(3, 10) + content_.substr(500));
    EXPECT_TRUE(wrong_.empty());
  }
}

TEST_F(RangeReading, NamesTheWrongBlock) {
  for (const Bytes block : {1_B, 7_B, 64_B, 999_B, 2000_B}) {
    for (const std::int64_t at : {0, 63, 500, 999}) {
      flip(at);
      read(block, {{0, Bytes(), 1000_B}});
      ASSERT_EQ(wrong_.size(), 1U) << block.value << " " << at;
      EXPECT_EQ(wrong_[0].begin, Bytes(at) - Bytes(at) % block);
      EXPECT_EQ(wrong_[0].end, std::min(wrong_[0].begin + block, 1000_B));
      flip(at);
    }
  }
}

TEST_F(RangeReading, ChecksOnlyBlocksThatItReadWhole) {
  flip(70);
  read(64_B, {{0, 0_B, 100_B}, {0, 110_B, 100_B}});
  EXPECT_TRUE(wrong_.empty());
  read(64_B, {{0, 64_B, 64_B}});
  EXPECT_EQ(wrong_.size(), 1U);
}

TEST_F(RangeReading, NamesWhatCannotBeRead) {
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
  const std::vector<FileRange> ranges{
      {0, 70_B, 10_B}, {0, 100_B, 60_B}, {0, 300_B, 20_B}, {0, 990_B, 5_B}, {1, 50_B, 1_B}};
  const auto blocks = whole_blocks(ranges, files);
  std::vector<std::array<std::int64_t, 3>> found;
  for (const FileRange& range : blocks)
    found.push_back({static_cast<std::int64_t>(range.file), range.offset.value, range.bytes.value});
  const std::vector<std::array<std::int64_t, 3>> wanted{
      {0, 64, 128}, {0, 256, 64}, {0, 960, 40}, {1, 0, 100}};
  EXPECT_EQ(found, wanted);
}

}  // namespace
}  // namespace strata::checkpoint
