#include "strata/offload/nvme_store.h"

#include <array>
#include <filesystem>
#include <fstream>

#include "io/faulty_calls.h"
#include "offload/late_file.h"
#include "offload/state_store_conformance.h"
#include "offload/store_harness.h"

namespace strata::offload {
namespace {

using ::testing::HasSubstr;
using VerifiedHarness = NvmeHarness<9, true>;

INSTANTIATE_TYPED_TEST_SUITE_P(TinyArena, StateStoreConformance, NvmeHarness<9>);
INSTANTIATE_TYPED_TEST_SUITE_P(MediumArena, StateStoreConformance, NvmeHarness<20>);
INSTANTIATE_TYPED_TEST_SUITE_P(AmpleArena, StateStoreConformance, NvmeHarness<300>);
INSTANTIATE_TYPED_TEST_SUITE_P(Verified, StateStoreConformance, VerifiedHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(LateDevice, StateStoreConformance, LateNvmeHarness<9>);
INSTANTIATE_TYPED_TEST_SUITE_P(LateDeviceAmple, StateStoreConformance, LateNvmeHarness<300>);

// A store on a file of its own, with calls that fail where a test says so.
struct NvmeStoreTest : ::testing::Test {
  void make(int pages, bool verify = false) {
    calls->set_benign(false);
    arena = std::make_shared<StagingArena>(device, kPartAlignment * pages);
    auto file = file_below(io, folder);
    path = file->path();
    store = make_nvme_store(
        device, NvmeStoreOptions{.arena = arena, .file = std::move(file), .verify = verify});
  }
  // Makes a store on a drive that takes no time.
  void make_prompt(int pages, bool read_ahead) {
    arena = std::make_shared<StagingArena>(device, kPartAlignment * pages);
    store = make_nvme_store(
        device, NvmeStoreOptions{.arena = arena,
                                 .file = std::make_unique<testing::LateFile>(1, 0, /*prompt=*/true),
                                 .read_ahead = read_ahead});
  }
  std::vector<BlockId> add(int count, Bytes bytes) {
    std::vector<BlockId> blocks;
    for (int i = 0; i < count; ++i) {
      blocks.push_back(
          store->add(fmt::format("unit {}.exp_avg", i), bytes, memory::Kind::kOptimizerState));
    }
    return blocks;
  }
  void write(BlockId block, int value) {
    const auto lease = store->fetch(block, Access::kReadWrite);
    std::ranges::fill(lease->bytes(), static_cast<std::byte>(value));
  }
  int read(BlockId block) {
    const auto lease = store->fetch(block, Access::kRead);
    const std::byte first = lease->bytes().front();
    EXPECT_TRUE(std::ranges::all_of(lease->bytes(), [&](std::byte b) { return b == first; }));
    return static_cast<int>(first);
  }
  // The message of the error that fetch() throws.
  std::string message_of(BlockId block) {
    return testing::message_of<IoError>([&] { store->fetch(block, Access::kRead); });
  }
  // Evicts all that is in memory.
  void crowd_out() { read(add(1, arena->budget()).front()); }

  testing::TemporaryFolder folder;
  std::string path;
  std::shared_ptr<testing::FaultyCalls> calls = std::make_shared<testing::FaultyCalls>(1);
  std::shared_ptr<io::IoEngine> io =
      std::make_shared<io::ThreadEngine>(io::EngineOptions{.threads = 2}, calls);
  device::CpuDevice device;
  std::shared_ptr<StagingArena> arena;
  std::unique_ptr<StateStore> store;
};

TEST_F(NvmeStoreTest, WhatWasNeverWrittenIsZeroesWithoutTheDrive) {
  make(8);
  for (const BlockId block : add(10, 12288_B)) EXPECT_EQ(read(block), 0);
  EXPECT_EQ(store->counts().reads, 0);
  EXPECT_EQ(store->counts().writes, 0);
}

TEST_F(NvmeStoreTest, WhatFitsIsReadNeverAgain) {
  make(8);
  const auto blocks = add(4, 8192_B);
  for (int round = 1; round < 6; ++round) {
    for (const BlockId block : blocks) {
      EXPECT_EQ(read(block), round - 1);
      write(block, round);
    }
  }
  store->flush();
  EXPECT_EQ(store->counts().reads, 0);
  EXPECT_EQ(store->counts().written, 8192_B * 20);
  EXPECT_EQ(std::filesystem::file_size(path), 4U * 8192);
}

TEST_F(NvmeStoreTest, ARoundIsReadAheadAndKeepsAShareOfThePartsInMemory) {
  for (const bool read_ahead : {false, true}) {
    make_prompt(16, read_ahead);
    const auto blocks = add(12, 8192_B);  // of which eight fit
    const auto round = [&](int value) {
      for (const BlockId block : blocks) {
        const auto lease = store->fetch(block, Access::kReadWrite);
        EXPECT_EQ(lease->bytes()[0], static_cast<std::byte>(value - 1));
        std::ranges::fill(lease->bytes(), static_cast<std::byte>(value));
      }
    };
    for (int value = 1; value < 5; ++value) round(value);
    const StoreCounts learned = store->counts();
    for (int value = 5; value < 8; ++value) round(value);
    const StoreCounts moved = store->counts() - learned;
    EXPECT_EQ(moved.parts, 36);
    EXPECT_EQ(moved.writes, 36);
    // There is room for eight; one is leased, two are prefetched.
    EXPECT_LE(moved.reads, 3 * 7);
    EXPECT_GE(moved.reads, 3 * 4);
    EXPECT_EQ(moved.parts_ready, read_ahead ? moved.parts : moved.parts - moved.reads);
  }
}

TEST_F(NvmeStoreTest, WhatIsNotUsedAnyMoreMakesRoomForWhatIs) {
  make_prompt(16, true);
  const auto before = add(8, 8192_B);
  const auto now = add(7, 8192_B);
  const auto round = [&](const std::vector<BlockId>& blocks, int value) {
    for (const BlockId block : blocks) write(block, value);
  };
  for (int value = 1; value < 4; ++value) round(before, value);
  for (int value = 1; value < 7; ++value) round(now, value);
  const StoreCounts learned = store->counts();
  for (int value = 7; value < 9; ++value) round(now, value);
  EXPECT_EQ((store->counts() - learned).reads, 0);
}

TEST_F(NvmeStoreTest, ToMeasureTheDriveTouchesNoBlock) {
  make(8, /*verify=*/true);
  const auto blocks = add(4, 8192_B);
  for (int i = 0; i < 4; ++i) write(blocks[static_cast<std::size_t>(i)], i + 1);
  const DriveLimit limit = store->measure_drives();
  EXPECT_GT(limit.read_gb_per_s, 0.0);
  EXPECT_GT(limit.write_gb_per_s, 0.0);
  const BlockId later = add(1, 16_KiB).front();  // where the drive was measured
  EXPECT_EQ(read(later), 0);
  write(later, 9);
  store->flush();
  crowd_out();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(read(blocks[static_cast<std::size_t>(i)]), i + 1);
  EXPECT_EQ(read(later), 9);
}

TEST_F(NvmeStoreTest, TellsWhatADriveWearsByAndWhoWatchesOfEachTransfer) {
  struct Watch final : LinkWatch {
    void record_transfer(Link link, Bytes bytes, const io::TransferTimes& times) override {
      moved.at(static_cast<std::size_t>(link)) += bytes;
      EXPECT_LE(times.begin, times.end);
    }
    std::array<Bytes, kLinkCount> moved{};
  } watch;
  make(8);
  store->watch(&watch);
  for (const BlockId block : add(8, 8192_B)) write(block, 1);
  for (BlockId block = 0; block < 8; ++block) EXPECT_EQ(read(block), 1);
  store->flush();
  crowd_out();
  store->watch(nullptr);
  write(0, 2);
  store->flush();
  const StoreCounts counts = store->counts();
  EXPECT_EQ(watch.moved.at(static_cast<std::size_t>(Link::kWrite)), counts.written - 8192_B);
  EXPECT_GT(counts.read, 0_B);
  ASSERT_EQ(store->drive_writes().size(), 1U);
  EXPECT_EQ(store->drive_writes()[0].folder, folder.path());
  EXPECT_EQ(store->drive_writes()[0].written, counts.written);
}

TEST_F(NvmeStoreTest, MemoryThatLeasesHoldIsAnErrorAndNoHang) {
  make(8);
  const auto blocks = add(3, 16384_B);
  for (const BlockId block : blocks) write(block, 7);
  {
    const auto one = store->fetch(blocks[0], Access::kRead);
    const auto other = store->fetch(blocks[1], Access::kRead);
    const auto message =
        testing::message_of<UsageError>([&] { store->fetch(blocks[2], Access::kRead); });
    EXPECT_THAT(message, HasSubstr("16.0 KiB wanted beside 32.0 KiB that are leased, of 32.0 KiB"));
  }
  EXPECT_EQ(read(blocks[2]), 7);
  const auto large = add(1, 100000_B).front();
  EXPECT_THROW(store->fetch(large, Access::kRead), UsageError);
  EXPECT_EQ(store->fetch(Part{large, 0_B, 32768_B}, Access::kRead)->bytes().size(), 32768U);
}

TEST_F(NvmeStoreTest, AReadThatFailsNamesBlockFileAndPlaceAndTheBlockIsNotLentAgain) {
  make(8);
  const auto blocks = add(3, 8192_B);
  for (const BlockId block : blocks) write(block, 5);
  crowd_out();
  calls->fail_at(8192_B + 4096_B, -EIO);
  const auto message = message_of(blocks[1]);
  EXPECT_THAT(message, HasSubstr("could not be read: block 'unit 1.exp_avg', bytes [0, 8192)"));
  EXPECT_THAT(message, HasSubstr("path=" + path + " offset=8192 wanted=8192 got=4096"));
  EXPECT_THAT(message, HasSubstr("errno=5"));
  EXPECT_EQ(message_of(blocks[1]), message);
  EXPECT_EQ(read(blocks[0]), 5);
  EXPECT_EQ(read(blocks[2]), 5);
  EXPECT_EQ(testing::message_of<IoError>([&] { store->flush(); }), message);
}

TEST_F(NvmeStoreTest, AWriteThatFailsIsToldByTheNextCallAndTheBlockIsNotLentAgain) {
  calls->fail_at(8192_B, -ENOSPC);
  for (const bool by_flush : {true, false}) {
    store.reset();
    std::filesystem::remove(path);
    make(2);
    const auto blocks = add(3, 8192_B);
    write(blocks[1], 5);
    const auto call = [&] {
      if (by_flush) {
        store->flush();
      } else {
        // There is room for one only; if the write has not ended before, it is waited for.
        read(blocks[0]);
        read(blocks[0]);
      }
    };
    const auto message = testing::message_of<IoError>(call);
    EXPECT_THAT(message, HasSubstr("could not be written: block 'unit 1.exp_avg'"));
    EXPECT_THAT(message, HasSubstr("offset=8192 wanted=8192 got=0 errno=28"));
    EXPECT_EQ(read(blocks[0]), 0);
    EXPECT_EQ(message_of(blocks[1]), message);
    EXPECT_EQ(testing::message_of<IoError>([&] { store->flush(); }), message);
  }
}

TEST_F(NvmeStoreTest, AFileThatWasCutOffIsAnError) {
  make(8);
  const auto blocks = add(2, 8192_B);
  for (const BlockId block : blocks) write(block, 5);
  crowd_out();
  std::filesystem::resize_file(path, 12288);
  EXPECT_EQ(read(blocks[0]), 5);
  EXPECT_THAT(message_of(blocks[1]), HasSubstr("wanted=8192 got=4096"));
}

TEST_F(NvmeStoreTest, ChecksumsTellBytesThatAreNotWhatWasWritten) {
  for (const bool verify : {false, true}) {
    store.reset();
    std::filesystem::remove(path);
    make(8, verify);
    const auto blocks = add(2, 8292_B);
    for (const BlockId block : blocks) write(block, 5);
    crowd_out();
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(12288 + 4096 + 17);
      file.put(6);
    }
    EXPECT_EQ(read(blocks[0]), 5);
    const auto message = message_of(blocks[1]);
    if (!verify) {
      EXPECT_EQ(message, "no exception");
    } else {
      EXPECT_THAT(message, HasSubstr("block 'unit 1.exp_avg'"));
      EXPECT_THAT(message, HasSubstr("checksum"));
      EXPECT_THAT(message, HasSubstr("path=" + path + " offset=16384"));
    }
  }
}

TEST_F(NvmeStoreTest, ADriveWithoutSpaceIsToldWhenBlocksAreAdded) {
  make(8);
  const auto block = add(1, 8192_B).front();
  write(block, 3);
  const auto message = testing::message_of<OutOfMemoryError>([&] { add(1, 1_GiB * (1 << 22)); });
  EXPECT_THAT(message, HasSubstr("wanted=4503599627370496 free="));
  EXPECT_THAT(message, HasSubstr(path));
  EXPECT_EQ(std::filesystem::file_size(path), 8192U);
  crowd_out();
  EXPECT_EQ(read(block), 3);
}

TEST_F(NvmeStoreTest, StoresShareAnArenaAndMakeRoomForEachOther) {
  make(8);
  const auto made_other = make_nvme_store(device, {.arena = arena, .file = file_below(io, folder)});
  StateStore& other = *made_other;
  const auto here = add(2, 16384_B);
  const auto there = other.add("there", 32768_B, memory::Kind::kMasterWeights);
  for (int round = 0; round < 3; ++round) {
    for (const BlockId block : here) write(block, round);
    std::ranges::fill(other.fetch(there, Access::kReadWrite)->bytes(), std::byte{9});
    for (const BlockId block : here) EXPECT_EQ(read(block), round);
    EXPECT_EQ(other.fetch(there, Access::kRead)->bytes()[32767], std::byte{9});
  }
}

TEST_F(NvmeStoreTest, ALeaseOutlivesItsStore) {
  make(8);
  auto lease = store->fetch(add(1, 8192_B).front(), Access::kReadWrite);
  store.reset();
  std::ranges::fill(lease->bytes(), std::byte{1});
  lease.reset();
  EXPECT_EQ(arena->in_use(), 0_B);
}

TEST_F(NvmeStoreTest, AHundredStartsLeaveNothingBehind) {
  const auto descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = descriptors();
  for (int start = 0; start < 100; ++start) {
    make(8);
    const auto blocks = add(3, 16384_B);
    for (const BlockId block : blocks) write(block, 7);
    auto lease = store->fetch(blocks[0], Access::kReadWrite);
    store.reset();
    lease.reset();
    ASSERT_EQ(arena->in_use(), 0_B);
    arena.reset();
    std::filesystem::remove(path);
  }
  EXPECT_EQ(descriptors(), before);
  EXPECT_EQ(device.ledger()->held(memory::Tier::kNvme), 0_B);
  EXPECT_EQ(device.ledger()->held(memory::Tier::kHost), 0_B);
}

}  // namespace
}  // namespace strata::offload
