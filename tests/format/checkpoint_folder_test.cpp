// The folder in which checkpoints appear whole.
#include "strata/format/checkpoint_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "io/forwarding_calls.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/io/thread_engine.h"

namespace strata::format {
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

// Whatever it is: a folder of the user's, a file, a link, a checkpoint of another library.
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

// Nor what came while its files were written.
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

}  // namespace
}  // namespace strata::format
