// A checkpoint that is written from whole tensors, one after the other: its content, and the files
// that an unfinished one leaves.
#include "strata/checkpoint/writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/format/checkpoint_index.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"

namespace strata::checkpoint {
namespace {

using namespace format;  // NOLINT(google-build-using-namespace): of what is written
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr DType kF32 = DType::kFloat32;

// A large tensor, so that buffers are filled several times, one without elements, and a buffer of
// wider elements, which comes first in its file.
std::vector<WholeTensor> example() {
  return {
      {{"w", TensorRole::kParameter, {1500, 1001}, DType::kBFloat16, true, {"head"}},
       {{"value", kF32}, {"exp_avg", kF32}, {"exp_avg_sq", kF32}}},
      {{"none", TensorRole::kParameter, {0, 4}, kF32, true, {}}, {{"value", kF32}}},
      {{"frozen", TensorRole::kParameter, {3}, DType::kBFloat16, false, {}},
       {{"value", DType::kBFloat16}}},
      {{"count", TensorRole::kBuffer, {}, DType::kInt64, false, {}}, {{"value", DType::kInt64}}}};
}

// Bytes that differ by tensor and kind.
std::vector<std::byte> bytes_for(std::size_t tensor, std::size_t kind) {
  const WholeTensor whole = example()[tensor];
  const Bytes size = bytes_of(*checked_numel(whole.tensor.shape), whole.kinds[kind].second);
  std::vector<std::byte> bytes(size.size());
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(i * 31 + tensor * 7 + kind);
  return bytes;
}

class WriteWhole : public ::testing::Test {
 protected:
  using Pair = std::pair<std::size_t, std::size_t>;

  // Fails when it is asked for the piece after `most`.
  void write(const WholeCheckpoint& checkpoint, std::size_t most = 99) {
    order_.clear();
    std::vector<std::byte> bytes;
    write_whole(
        checkpoint,
        [&](std::size_t tensor, std::size_t kind) -> std::span<const std::byte> {
          if (order_.size() == most) throw IoError("no more");
          order_.emplace_back(tensor, kind);
          EXPECT_FALSE(find_checkpoint(folder(), "new"));
          return bytes = bytes_for(tensor, kind);
        },
        io_, calls_);
  }
  std::string folder() const { return folder_ / "checkpoints"; }

  testing::TemporaryFolder folder_;
  io::ThreadEngine io_;
  io::FolderCalls calls_;
  std::vector<Pair> order_;
};

TEST_F(WriteWhole, HoldsWhatWasReadAndItsChecksums) {
  write({folder(), "new", example(), R"({"global_steps":3})", 2, 3, {}});
  EXPECT_THAT(order_, ElementsAre(Pair(3, 0), Pair(0, 0), Pair(2, 0), Pair(0, 1), Pair(0, 2)));

  EXPECT_EQ(latest_tag(folder()), "new");
  const std::string path = folder() + "/new";
  const Manifest manifest = read_manifest(path);
  EXPECT_EQ(manifest.training, R"({"global_steps":3})");
  EXPECT_EQ(manifest.world_size, 2);
  EXPECT_EQ(manifest.stage, 3);
  EXPECT_THAT(manifest.kinds, ElementsAre("value", "exp_avg", "exp_avg_sq"));
  ASSERT_EQ(manifest.tensors.size(), 4U);
  EXPECT_EQ(manifest.tensors[0], example()[0].tensor);
  ASSERT_EQ(manifest.extents.size(), order_.size());
  for (std::size_t i = 0; i < manifest.extents.size(); ++i) {
    const ManifestRange& extent = manifest.extents[i];
    const auto expected = bytes_for(order_[i].first, order_[i].second);
    std::vector<std::byte> found(expected.size());
    const io::File file(path + "/" + manifest.files[extent.file].name, io::File::Mode::kRead);
    io::read_fully(file, extent.offset, found);
    EXPECT_EQ(found, expected) << i;
  }
  for (const ManifestFile& entry : manifest.files) {
    const io::File file(path + "/" + entry.name, io::File::Mode::kRead);
    std::vector<std::byte> all(file.size().size());
    io::read_fully(file, Bytes(), all);
    BlockChecksums sums(entry.checksums.block(), {});
    sums.set(Bytes(), all);
    EXPECT_EQ(entry.checksums.sums(), sums.sums()) << entry.name;
  }
  const CheckpointIndex values(path + "/model-00000-of-00001.safetensors");
  ASSERT_NE(values.find("w"), nullptr);
  EXPECT_THAT(values.find("w")->info.shape, ElementsAre(1500, 1001));
  EXPECT_NE(values.find("buffer:count"), nullptr);
}

TEST_F(WriteWhole, LeavesTheOldOneUntilItIsWhole) {
  write({folder(), "t", {example()[0]}, "{}", 1, 0, {}});
  for (const std::size_t most : {0U, 1U, 4U})
    EXPECT_THROW(write({folder(), "t", example(), "{}", 1, 0, {}}, most), IoError);
  EXPECT_EQ(read_manifest(folder() + "/t").tensors.size(), 1U);
  EXPECT_THAT(whole_checkpoints(folder()), ElementsAre("t"));
  int entries = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder()))
    entries += entry.is_directory() ? 1 : 0;
  EXPECT_EQ(entries, 1);
}

TEST_F(WriteWhole, SaysWhichTensorHasAnotherSize) {
  const std::vector<std::byte> seven(7);
  try {
    write_whole(
        {folder(), "t", example(), "{}", 1, 0, {}},
        [&](std::size_t, std::size_t) { return std::span<const std::byte>(seven); }, io_, calls_);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'count' (value) wanted=8 found=7"));
  }
  EXPECT_THROW(write({folder(), "../t", example(), "{}", 1, 0, {}}), UsageError);
  auto twice = example();
  twice.push_back(twice.front());
  EXPECT_THROW(write({folder() + "2", "t", twice, "{}", 1, 0, {}}), UsageError);
}

}  // namespace
}  // namespace strata::checkpoint
