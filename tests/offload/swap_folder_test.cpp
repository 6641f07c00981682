#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/io/thread_engine.h"
#include "strata/offload/block_file.h"

namespace strata::offload {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

unsigned permissions_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 0777U;
}

TEST(SwapFolder, IsPrivateAndGoesWithItsFile) {
  const testing::TemporaryFolder root;
  auto folder = std::make_unique<SwapFolder>(root.path(), 3);
  const std::string path = folder->path();
  EXPECT_THAT(path, ::testing::StartsWith(root.path() + "/strata-swap.rank3."));
  EXPECT_EQ(permissions_of(path), 0700U);
  std::vector<std::unique_ptr<SwapFolder>> folders;
  folders.push_back(std::move(folder));
  auto file = make_block_file(std::make_shared<io::ThreadEngine>(), std::move(folders));
  file->grow(100000_B);
  EXPECT_EQ(file->path(), path + "/states");
  for (const auto& entry : std::filesystem::directory_iterator(path))
    EXPECT_EQ(permissions_of(entry.path()), 0600U) << entry.path();
  file.reset();
  EXPECT_THAT(root.names(), IsEmpty());
}

TEST(SwapFolder, JobsOfOnePathHaveTheirOwn) {
  const testing::TemporaryFolder root;
  const SwapFolder one(root.path(), 0);
  const SwapFolder other(root.path() + "/", 0);
  EXPECT_NE(one.path(), other.path());
  EXPECT_THAT(root.names(), SizeIs(2));
}

TEST(SwapFolder, WhatAKilledJobLeftIsRemoved) {
  const testing::TemporaryFolder root;
  const SwapFolder living(root.path(), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const SwapFolder folder(root.path(), 0);
    ::_exit(0);  // as if it were killed
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_THAT(root.names(), SizeIs(2));
  ASSERT_TRUE(std::filesystem::exists(living.path()));
  const SwapFolder next(root.path(), 0);
  EXPECT_THAT(root.names(), SizeIs(2));
  EXPECT_TRUE(std::filesystem::exists(living.path()));
  EXPECT_TRUE(std::filesystem::exists(next.path()));
}

TEST(SwapFolder, AForkedProcessDoesNotRemoveTheFolder) {
  const testing::TemporaryFolder root;
  auto folder = std::make_unique<SwapFolder>(root.path(), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    folder.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(std::filesystem::exists(folder->path()));
}

TEST(SwapFolder, OnlyItsLikeIsRemoved) {
  const testing::TemporaryFolder root;
  std::filesystem::create_directory(root / "strata-swap.rank0.empty");
  std::filesystem::create_directory(root / "strata-swap.of a user");
  root.write("strata-swap.of a user/file", "kept");
  root.write("strata-swap.file", "kept");
  std::filesystem::create_directory(root / "other");
  root.write("other/lock", "kept");
  std::filesystem::create_directory_symlink(root / "other", root / "strata-swap.link");
  const SwapFolder folder(root.path(), 0);
  EXPECT_FALSE(std::filesystem::exists(root / "strata-swap.rank0.empty"));
  EXPECT_THAT(root.names(), SizeIs(5));
  EXPECT_EQ(testing::content_of(root / "other/lock"), "kept");
}

TEST(SwapFolder, RanksThatStartAtOnceLeaveEachOtherTheirFolders) {
  const testing::TemporaryFolder root;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&root, rank] {
      for (int start = 0; start < 25; ++start) {
        const SwapFolder folder(root.path(), rank);
        EXPECT_TRUE(std::filesystem::exists(folder.path() + "/lock"));
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_THAT(root.names(), IsEmpty());
}

TEST(SwapFolder, PathsThatWillNotDoAreNamedWithTheReason) {
  const testing::TemporaryFolder root;
  const auto message = [](const std::string& path) {
    return testing::message_of<IoError>([&] { SwapFolder(path, 0); });
  };
  EXPECT_THAT(message(root / "missing"), HasSubstr("path=" + root.path() + "/missing errno=2"));
  EXPECT_THAT(message(root / "missing"), HasSubstr("mount the drive"));
  EXPECT_THAT(message(root.write("file", "")), HasSubstr("is not a folder"));
  EXPECT_THAT(message(""), HasSubstr("path= "));
  // No user can make a folder there.
  EXPECT_THAT(message("/proc"), HasSubstr("cannot make a folder for states on a drive; choose"));
  if (::geteuid() == 0) return;  // root may write everywhere
  ::chmod(root.path().c_str(), 0500);
  EXPECT_THAT(message(root.path()), HasSubstr("errno=13"));
  ::chmod(root.path().c_str(), 0700);
}

TEST(SwapFolder, MemoryThatPassesForADriveIsRemarkedOn) {
  struct statfs status {};
  if (::statfs("/dev/shm", &status) != 0 || status.f_type != 0x01021994) GTEST_SKIP();
  const SwapFolder folder("/dev/shm", 0);
  EXPECT_EQ(folder.file_system().medium, FileSystem::Medium::kMemory);
  EXPECT_EQ(folder.file_system().name, "tmpfs");
  EXPECT_THAT(folder.warning(), HasSubstr("/dev/shm is on tmpfs"));
}

}  // namespace
}  // namespace strata::offload
