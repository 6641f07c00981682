// Transfers past the page cache: the bytes that go that way, and the fallback where they cannot.
#include <filesystem>

#include "io/direct_transfers.h"
#include "io/faulty_calls.h"
#include "io/io_engine_conformance.h"
#include "strata/io/thread_engine.h"

namespace strata::testing {
namespace {

using ::testing::HasSubstr;
using Mode = io::File::Mode;

constexpr Bytes kBlock = io::File::kDirectBlock;

struct DirectThreadEngine {
  static constexpr Bytes kPiece = kBlock * 2;
  static std::unique_ptr<io::IoEngine> make() {
    return std::make_unique<DirectTransfers>(std::make_unique<io::ThreadEngine>(
        io::EngineOptions{.piece = kPiece, .threads = 3, .queue_max = 4}));
  }
};

// Pieces that are no blocks, transfers that are short by sectors, and EINTR.
struct FaultyDirectEngine {
  static constexpr Bytes kPiece = 5000_B;
  static std::unique_ptr<io::IoEngine> make() {
    return std::make_unique<DirectTransfers>(std::make_unique<io::ThreadEngine>(
        io::EngineOptions{.piece = kPiece, .threads = 3, .queue_max = 4},
        std::make_shared<FaultyCalls>(20261121U)));
  }
};

struct RefusedDirectEngine {
  static constexpr Bytes kPiece = kBlock;
  static std::unique_ptr<io::IoEngine> make() {
    auto calls = std::make_shared<FaultyCalls>(5U);
    calls->fail_direct(-EINVAL);
    return std::make_unique<DirectTransfers>(std::make_unique<io::ThreadEngine>(
        io::EngineOptions{.piece = kPiece, .threads = 2, .queue_max = 4}, calls));
  }
};

using DirectEngines = ::testing::Types<DirectThreadEngine, FaultyDirectEngine, RefusedDirectEngine>;
INSTANTIATE_TYPED_TEST_SUITE_P(DirectTransfers, IoEngineConformance, DirectEngines);

// A file of ten blocks and 100 bytes, read by one thread whose calls are counted.
class DirectTransfer : public ::testing::Test {
 protected:
  DirectTransfer() : content_(patterned_bytes(kBlock.size() * 10 + 100, 8)) {
    calls_->set_benign(false);
    io::File file(folder_ / "data", Mode::kCreate);
    engine_.write(file, 0_B, content_)->wait();
  }

  // Into memory `past` bytes beyond a block; fails unless the bytes are the file's.
  void read(const io::File& file, std::size_t offset, std::size_t bytes, std::size_t past) {
    BlockMemory memory(bytes, past);
    engine_.read(file, Bytes(offset), memory.bytes())->wait();
    EXPECT_TRUE(std::ranges::equal(memory.bytes(), std::span(content_).subspan(offset, bytes)))
        << "offset " << offset << " bytes " << bytes;
  }
  // Writes the file's bytes there from such memory.
  void write(const io::File& file, std::size_t offset, std::size_t bytes, std::size_t past) {
    BlockMemory memory(bytes, past);
    std::ranges::copy(std::span(content_).subspan(offset, bytes), memory.bytes().begin());
    engine_.write(file, Bytes(offset), memory.bytes())->wait();
  }
  // Where the folder's file system has no direct reads, no byte comes that way.
  Bytes if_offered(const io::File& file, Bytes bytes) const {
    return file.direct_fd() >= 0 ? bytes : Bytes();
  }

  TemporaryFolder folder_;
  std::shared_ptr<FaultyCalls> calls_ = std::make_shared<FaultyCalls>(3U);
  io::ThreadEngine engine_{{.piece = 1_MiB, .threads = 1, .queue_max = 8}, calls_};
  std::vector<std::byte> content_;
};

TEST_F(DirectTransfer, WholeBlocksGoPastTheCacheAndTheFilesTailThroughIt) {
  const io::File file = io::File(folder_ / "data", Mode::kRead).direct();
  read(file, 0, content_.size(), 0);
  EXPECT_EQ(calls_->direct_bytes(), if_offered(file, kBlock * 10));
}

TEST_F(DirectTransfer, OnlyTheBlocksInsideOfARangeGoPastTheCache) {
  const io::File file = io::File(folder_ / "data", Mode::kRead).direct();
  read(file, 100, kBlock.size() * 3, 100);
  EXPECT_EQ(calls_->direct_bytes(), if_offered(file, kBlock * 2));
  read(file, 7, 50, 7);
  EXPECT_EQ(calls_->direct_bytes(), if_offered(file, kBlock * 2));
}

TEST_F(DirectTransfer, MemoryThatDoesNotLieAsTheFileDoesIsReadThroughTheCache) {
  const io::File file = io::File(folder_ / "data", Mode::kRead).direct();
  read(file, 0, kBlock.size() * 4, 8);
  EXPECT_EQ(calls_->direct_calls(), 0);
}

TEST_F(DirectTransfer, WhatTheSystemRefusesIsReadThroughTheCache) {
  const io::File file = io::File(folder_ / "data", Mode::kRead).direct();
  for (const int code : {EINVAL, EOPNOTSUPP}) {
    calls_->fail_direct(-code);
    read(file, kBlock.size(), content_.size() - kBlock.size(), 0);
  }
  EXPECT_EQ(calls_->direct_calls(), file.direct_fd() >= 0 ? 2 : 0) << "once a transfer";
  EXPECT_EQ(calls_->direct_bytes(), 0_B);
}

TEST_F(DirectTransfer, AFailingDriveIsAnErrorThisWayToo) {
  const io::File file = io::File(folder_ / "data", Mode::kRead).direct();
  calls_->fail_at(kBlock * 2, -EIO);
  BlockMemory memory(kBlock.size() * 4, 0);
  const auto transfer = engine_.read(file, 0_B, memory.bytes());
  EXPECT_THAT(message_of<IoError>([&] { transfer->wait(); }),
              HasSubstr("offset=0 wanted=16384 got=8192 errno=5"));
}

TEST_F(DirectTransfer, WholeBlocksAreWrittenPastTheCacheAndTheRestThroughIt) {
  const io::File other(folder_ / "other", Mode::kCreate);
  const io::File file = other.direct();
  const std::size_t first = kBlock.size() * 3 + 100;
  write(file, 0, first, 0);
  write(file, first, content_.size() - first, 100);
  EXPECT_EQ(calls_->direct_bytes(), if_offered(file, kBlock * 9));
  read(other, 0, content_.size(), 0);
}

TEST_F(DirectTransfer, WhatTheSystemRefusesIsWrittenThroughTheCache) {
  const io::File file = io::File(folder_ / "other", Mode::kCreate).direct();
  calls_->fail_direct(-EINVAL);
  write(file, 0, content_.size(), 0);
  EXPECT_EQ(calls_->direct_bytes(), 0_B);
  read(file, 0, content_.size(), 8);
}

TEST_F(DirectTransfer, AFullDriveIsAnErrorThisWayToo) {
  const io::File file = io::File(folder_ / "other", Mode::kCreate).direct();
  calls_->fail_at(kBlock * 2, -ENOSPC);
  EXPECT_THAT(message_of<IoError>([&] { write(file, 0, kBlock.size() * 4, 0); }),
              HasSubstr("offset=0 wanted=16384 got=8192 errno=28"));
}

TEST_F(DirectTransfer, AFileOpenedForReadingIsNotWrittenThisWay) {
  const io::File file = io::File(folder_ / "data", Mode::kRead).direct();
  EXPECT_THROW(write(file, 0, kBlock.size(), 0), IoError);
}

TEST_F(DirectTransfer, ReadsTheFileThatWasOpenedWhateverHasItsNameNow) {
  const io::File opened(folder_ / "data", Mode::kRead);
  folder_.write("other", "something else");
  std::filesystem::rename(folder_ / "other", folder_ / "data");
  const io::File file = opened.direct();
  read(file, 0, content_.size(), 0);
  EXPECT_EQ(file.path(), opened.path());
}

TEST_F(DirectTransfer, AFileSystemWithoutDirectTransfersIsReadThroughTheCacheSilently) {
  const io::File file = io::File("/proc/self/maps", Mode::kRead).direct();
  EXPECT_EQ(file.direct_fd(), -1);
  BlockMemory memory(64, 0);
  EXPECT_NO_THROW(engine_.read(file, 0_B, memory.bytes())->wait());
}

}  // namespace
}  // namespace strata::testing
