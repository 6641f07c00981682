// The folder in which checkpoints appear whole.
#include "strata/format/checkpoint_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "io/temporary_folder.h"

namespace strata::format {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

class RecordedCalls final : public io::FolderCalls {
 public:
  void make_folder(const std::string& path) override { kernel_.make_folder(path); }
  io::File create(const std::string& path) override { return kernel_.create(path); }
  void sync_file(io::File& file) override { kernel_.sync_file(file); }
  void sync_folder(const std::string& path) override {
    synced.push_back(path);
    kernel_.sync_folder(path);
  }
  void rename(const std::string& from, const std::string& to) override { kernel_.rename(from, to); }
  bool exchange(const std::string& one, const std::string& other) override {
    return kernel_.exchange(one, other);
  }
  void remove_tree(const std::string& path) override { kernel_.remove_tree(path); }
  void open_to_others(const io::File& file) override { kernel_.open_to_others(file); }

  std::vector<std::string> synced;

 private:
  io::KernelFolderCalls kernel_;
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

}  // namespace
}  // namespace strata::format
