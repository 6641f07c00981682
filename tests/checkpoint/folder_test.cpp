// The folder in which checkpoints appear whole.
#include "strata/checkpoint/folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "io/forwarding_calls.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/io/thread_engine.h"

namespace strata::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::UnorderedElementsAre;

class RecordedCalls final : public testing::ForwardingCalls {
 public:
  void sync_folder(const std::string& path) override {
    synced.push_back(path);
    ForwardingCalls::sync_folder(path);
  }

  std::vector<std::string> synced;
};

TEST(CheckpointFolder, BringsTheNamesOfFoldersThatItMakesToDisk) {
  const testing::TemporaryFolder folder;
  RecordedCalls calls;
  { const NewCheckpoint first(folder / "a/b", "tag", calls); }
  EXPECT_THAT(calls.synced, ElementsAre(folder.path(), folder / "a"));
  calls.synced.clear();
  { const NewCheckpoint second(folder / "a/b/", "tag", calls); }
  EXPECT_THAT(calls.synced, IsEmpty());
}

TEST(CheckpointFolder, NamesAFileThatHasItsName) {
  const testing::TemporaryFolder folder;
  folder.write("a", "text");
  RecordedCalls calls;
  EXPECT_THAT(message_of<IoError>([&] { NewCheckpoint(folder / "a", "tag", calls); }),
              HasSubstr("a file has the name"));
  EXPECT_THAT(message_of<IoError>([&] { NewCheckpoint(folder / "a/b", "tag", calls); }),
              HasSubstr("cannot make a folder"));
}

// The name may belong to a folder of the user's, a file, a link, or another library's checkpoint.
TEST(CheckpointFolder, ReplacesNothingButCheckpoints) {
  const testing::TemporaryFolder folder;
  std::filesystem::create_directories(folder / "data");
  folder.write("data/mine", "text");
  folder.write("file", "text");
  std::filesystem::create_directory_symlink(folder / "data", folder / "link");
  RecordedCalls calls;
  for (const std::string tag : {"data", "file", "link"}) {
    EXPECT_THAT(message_of<UsageError>([&] { NewCheckpoint(folder.path(), tag, calls); }),
                AllOf(HasSubstr("something else has the name"), HasSubstr(folder / tag)));
  }
  EXPECT_EQ(testing::content_of(folder / "data/mine"), "text");
}

// Another program took the name while the checkpoint's files were written.
TEST(CheckpointFolder, ReplacesNothingThatCameMeanwhile) {
  const testing::TemporaryFolder folder;
  RecordedCalls calls;
  io::ThreadEngine io;
  {
    NewCheckpoint checkpoint(folder.path(), "data", calls);
    std::filesystem::create_directories(folder / "data");
    folder.write("data/mine", "text");
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint.publish({}, {}, io); }),
                HasSubstr("something else has the name"));
  }
  EXPECT_THAT(folder.names(), UnorderedElementsAre(".strata.lock", "data"));
  EXPECT_EQ(testing::content_of(folder / "data/mine"), "text");
}

// As workers of a DataLoader are: they have every descriptor of the process that makes them.
TEST(CheckpointFolder, IsFreeAfterASaveDuringWhichAProcessWasForked) {
  const testing::TemporaryFolder folder;
  RecordedCalls calls;
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  char byte = 0;
  pid_t child = -1;
  {
    std::optional<NewCheckpoint> first(std::in_place, folder.path(), "first", calls);
    child = ::fork();
    if (child == 0) {
      ::close(ends[1]);
      first.reset();  // the save is the parent's still
      const bool told = ::write(ends[0], &byte, 1) == 1;
      ::_exit(told && ::read(ends[0], &byte, 1) == 0 ? 0 : 1);  // when the parent has seen enough
    }
    ::close(ends[0]);
    ASSERT_EQ(::read(ends[1], &byte, 1), 1);
    EXPECT_THAT(message_of<IoError>([&] { NewCheckpoint(folder.path(), "beside", calls); }),
                HasSubstr("another process is saving"));
    EXPECT_TRUE(std::filesystem::exists(first->staging()));
  }
  EXPECT_NO_THROW(NewCheckpoint(folder.path(), "second", calls));
  ::close(ends[1]);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace strata::checkpoint
