#include "strata/io/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/temporary_folder.h"
#include "strata/io/folder_calls.h"
#include "strata/io/pending_range.h"

namespace strata::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Mode = io::File::Mode;

TEST(File, SaysWhichFileIsMissing) {
  const TemporaryFolder folder;
  EXPECT_EQ(
      message_of<IoError>([&] { io::File(folder / "absent", Mode::kRead); }),
      "cannot open a file: path=" + folder / "absent" + " errno=2 (No such file or directory)");
  EXPECT_THAT(message_of<IoError>([&] { io::File(folder / "no/such", Mode::kCreate); }),
              HasSubstr("cannot create a file"));
}

TEST(File, RefusesAFolderAndAPipe) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of<IoError>([&] { io::File(folder.path(), Mode::kRead); }),
              HasSubstr("it is a directory"));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of<IoError>([&] { io::File(folder / "pipe", Mode::kRead); }),
              HasSubstr("not a regular file"));
}

TEST(File, CreatingEmptiesAndReopeningKeeps) {
  const TemporaryFolder folder;
  folder.write("data", "12345");
  EXPECT_EQ(io::File(folder / "data", Mode::kReadWrite).size(), 5_B);
  EXPECT_EQ(io::File(folder / "data", Mode::kCreate).size(), 0_B);
}

TEST(File, ReservingTakesTheSpaceAtOnce) {
  const TemporaryFolder folder;
  io::File file(folder / "data", Mode::kCreate);
  file.reserve(1_MiB);
  EXPECT_EQ(file.size(), 1_MiB);
  file.reserve(0_B);
  EXPECT_EQ(file.size(), 1_MiB);
}

TEST(File, ReservingMoreThanTheDiskHoldsNamesTheSize) {
  const TemporaryFolder folder;
  io::File file(folder / "data", Mode::kCreate);
  const std::string message =
      message_of<IoError>([&] { file.reserve(Bytes(std::int64_t{1} << 60)); });
  EXPECT_THAT(message, HasSubstr("cannot reserve space"));
  EXPECT_THAT(message, HasSubstr("path=" + file.path() + " wanted=1152921504606846976"));
  EXPECT_THAT(message, HasSubstr("errno="));
}

TEST(File, MovingHandsTheDescriptorOver) {
  const TemporaryFolder folder;
  folder.write("a", "1");
  folder.write("b", "22");
  io::File first(folder / "a", Mode::kRead);
  io::File second(folder / "b", Mode::kRead);
  first = std::move(second);
  EXPECT_EQ(first.size(), 2_B);
  EXPECT_EQ(first.path(), folder / "b");
  io::File third(std::move(first));
  EXPECT_EQ(third.size(), 2_B);
}

TEST(AtomicFile, AppearsOnlyWhenPublished) {
  const TemporaryFolder folder;
  folder.write("data", "old");
  const auto fresh = patterned_bytes(9, 1);
  {
    io::AtomicFile file(folder / "data");
    io::write_fully(file.file(), Bytes(0), fresh);
    file.seal();
    EXPECT_EQ(content_of(folder / "data"), "old");
    file.publish();
  }
  EXPECT_THAT(folder.names(), UnorderedElementsAre("data"));
  EXPECT_EQ(content_of(folder / "data").size(), 9U);
}

TEST(AtomicFile, DroppedBeforePublishingLeavesTheOldFileAndNoRest) {
  const TemporaryFolder folder;
  folder.write("data", "old");
  { io::AtomicFile file(folder / "data"); }
  EXPECT_THAT(folder.names(), UnorderedElementsAre("data"));
  EXPECT_EQ(content_of(folder / "data"), "old");
}

TEST(AtomicFile, SaysWhenItsTemporaryWasTakenAway) {
  const TemporaryFolder folder;
  io::AtomicFile file(folder / "data");
  EXPECT_TRUE(io::remove_file(file.file().path()));
  EXPECT_FALSE(io::remove_file(file.file().path()));
  EXPECT_THAT(message_of<IoError>([&] { file.publish(); }), HasSubstr("cannot rename"));
}

TEST(AtomicFile, FollowsNoLinkThatLiesWhereATemporaryMightBe) {
  const TemporaryFolder folder;
  folder.write("victim", "precious");
  ASSERT_EQ(::symlink((folder / "victim").c_str(), (folder / "data.partial").c_str()), 0);
  io::write_file_atomically(folder / "data", "new");
  EXPECT_EQ(content_of(folder / "victim"), "precious");
  EXPECT_EQ(content_of(folder / "data"), "new");
  EXPECT_THAT(folder.names(), UnorderedElementsAre("data", "data.partial", "victim"));
  EXPECT_THAT(message_of<IoError>([&] { io::File(folder / "data.partial", Mode::kCreateNew); }),
              HasSubstr("cannot create a file: path=" + folder / "data.partial" + " errno=17"));
  EXPECT_THAT(message_of<IoError>([&] { io::File(folder / "data", Mode::kCreateNew); }),
              HasSubstr("errno=17"));
}

TEST(AtomicFile, HasAnotherTemporaryEachTimeThatNamesItsTarget) {
  const TemporaryFolder folder;
  std::string first;
  {
    io::AtomicFile file(folder / "data");
    first = file.file().path();
    EXPECT_EQ(io::AtomicFile::target_of(first), folder / "data");
  }
  io::AtomicFile file(folder / "data");
  EXPECT_NE(file.file().path(), first);
  for (const std::string_view name :
       {"data", ".partial", "data.partial", "data.0123456789abcdeg.partial",
        "data.123456789abcdef.partial", ".0123456789abcdef.partial"}) {
    EXPECT_EQ(io::AtomicFile::target_of(name), name);
  }
}

TEST(AtomicFile, IsItsOwnersAloneUntilItIsPublishedWithTheUsualPermissions) {
  const TemporaryFolder folder;
  const auto permissions_of = [](const std::string& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0);
    return status.st_mode & 0777;
  };
  { io::File usual(folder / "usual", Mode::kCreate); }
  io::AtomicFile file(folder / "data");
  EXPECT_EQ(permissions_of(file.file().path()), 0600U);
  file.publish();
  EXPECT_EQ(permissions_of(folder / "data"), permissions_of(folder / "usual"));
}

}  // namespace
}  // namespace strata::testing
