// Block files of one and of several drives.
#include "strata/offload/block_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "io/faulty_calls.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/io/thread_engine.h"
#include "strata/memory/host_buffer.h"

namespace strata::offload {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct BlockFileTest : ::testing::Test {
  std::unique_ptr<BlockFile> on_drives(std::size_t count) {
    std::vector<std::unique_ptr<SwapFolder>> folders;
    for (std::size_t drive = 0; drive < count; ++drive)
      folders.push_back(std::make_unique<SwapFolder>(drives.at(drive).path(), /*rank=*/0));
    for (const auto& folder : folders) paths.push_back(folder->path() + "/states");
    return make_block_file(io, std::move(folders));
  }

  std::array<testing::TemporaryFolder, 3> drives;
  std::vector<std::string> paths;
  std::shared_ptr<testing::FaultyCalls> calls = std::make_shared<testing::FaultyCalls>(1);
  std::shared_ptr<io::IoEngine> io =
      std::make_shared<io::ThreadEngine>(io::EngineOptions{.threads = 2}, calls);
};

TEST_F(BlockFileTest, GivesBackWhatWasWrittenWhereverItLies) {
  const auto file = on_drives(3);
  constexpr Bytes kSize = 40_MiB;
  file->grow(kSize / 2);
  file->grow(kSize);
  memory::HostBuffer expected(kSize);
  memory::HostBuffer found(kSize);
  std::mt19937 random(7);
  for (std::size_t at = 0; at < expected.bytes().size(); at += 4096)
    expected.bytes()[at] = static_cast<std::byte>(random());
  file->write(0_B, expected.bytes())->wait();
  constexpr std::size_t kHalf = (20_MiB + 4_KiB).size();
  file->read(0_B, found.bytes().first(kHalf))->wait();
  file->read(Bytes(kHalf), found.bytes().subspan(kHalf))->wait();
  EXPECT_TRUE(std::ranges::equal(expected.bytes(), found.bytes()));
  Bytes all;
  for (const std::string& path : paths) {
    const Bytes bytes(std::filesystem::file_size(path));
    EXPECT_GE(bytes, 1_MiB) << "each drive holds a part";
    all += bytes;
  }
  EXPECT_EQ(all, kSize) << "and no space is taken twice";
  EXPECT_THAT(file->path(), ::testing::EndsWith("/states and 2 more"));
}

TEST_F(BlockFileTest, TellsWhatEachDriveWearsBy) {
  const auto file = on_drives(2);
  file->grow(16_MiB);
  const std::vector<DriveWrites> before = file->drive_writes();  // each was measured
  memory::HostBuffer source(16_MiB);
  const auto transfer = file->write(0_B, source.bytes());
  transfer->wait();
  EXPECT_TRUE(transfer->times());
  const std::vector<DriveWrites> after = file->drive_writes();
  ASSERT_EQ(after.size(), 2U);
  Bytes all;
  for (std::size_t drive = 0; drive < 2; ++drive) {
    EXPECT_EQ(after[drive].folder, drives.at(drive).path());
    EXPECT_GT(before[drive].written, 0_B);
    EXPECT_GT(after[drive].written, before[drive].written);
    all += after[drive].written - before[drive].written;
  }
  EXPECT_EQ(all, 16_MiB);
}

TEST_F(BlockFileTest, AFailureNamesTheDriveThatFailed) {
  const auto file = on_drives(2);
  file->grow(16_MiB);
  std::filesystem::resize_file(paths[1], 0);
  memory::HostBuffer found(16_MiB);
  const auto transfer = file->read(0_B, found.bytes());
  EXPECT_THAT(testing::message_of<IoError>([&] { transfer->wait(); }),
              HasSubstr("path=" + paths[1] + " offset=0"));
}

TEST_F(BlockFileTest, ADriveThatIsTooSmallLeavesTheOthersAsTheyWere) {
  const auto file = on_drives(2);
  file->grow(8_MiB);
  EXPECT_THAT(
      testing::message_of<OutOfMemoryError>([&] { file->grow(Bytes(std::int64_t{1} << 60)); }),
      HasSubstr("there is too little space for states on the drive"));
  EXPECT_EQ(std::filesystem::file_size(paths[0]) + std::filesystem::file_size(paths[1]),
            (8_MiB).size());
}

TEST_F(BlockFileTest, FoldersGoWithIt) {
  on_drives(2).reset();
  EXPECT_THAT(drives[0].names(), IsEmpty());
  EXPECT_THAT(drives[1].names(), IsEmpty());
}

TEST_F(BlockFileTest, MeasuringADriveLeavesNothing) {
  const auto file = on_drives(2);
  for (const DriveWrites& measured : file->drive_writes()) EXPECT_GT(measured.written, 0_B);
  for (const std::string& path : paths) EXPECT_EQ(std::filesystem::file_size(path), 0U);
}

}  // namespace
}  // namespace strata::offload
