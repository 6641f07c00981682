// A checkpoint that is written from whole tensors, one after the other: what is in it, and what is
// left of one that is not finished.
#include "strata/format/whole_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/format/safetensors_file.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"

namespace strata::format {
namespace {

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

std::vector<std::byte> bytes_for(const WholePiece& piece) {
  std::vector<std::byte> bytes(piece.bytes.size());
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(i * 31 + piece.tensor * 7 + piece.kind);
  return bytes;
}

class WholeCheckpoint : public ::testing::Test {
 protected:
  std::string folder() const { return folder_ / "checkpoints"; }
  testing::TemporaryFolder folder_;
  io::ThreadEngine io_;
  io::KernelFolderCalls calls_;
};

TEST_F(WholeCheckpoint, HoldsWhatWasWrittenAndItsChecksums) {
  WholeCheckpointWriter writer(folder(), "t", example(), io_, calls_);
  std::vector<std::pair<std::size_t, std::size_t>> order;
  for (const WholePiece& piece : writer.order()) {
    order.emplace_back(piece.tensor, piece.kind);
    writer.write(bytes_for(piece));
  }
  using Pair = std::pair<std::size_t, std::size_t>;
  EXPECT_THAT(order, ElementsAre(Pair(3, 0), Pair(0, 0), Pair(2, 0), Pair(0, 1), Pair(0, 2)));
  EXPECT_FALSE(find_checkpoint(folder(), "t"));
  writer.publish({R"({"global_steps":3})", 2, 3, {}});

  EXPECT_EQ(latest_tag(folder()), "t");
  const std::string path = folder() + "/t";
  const Manifest manifest = read_manifest(path);
  EXPECT_EQ(manifest.training, R"({"global_steps":3})");
  EXPECT_EQ(manifest.world_size, 2);
  EXPECT_EQ(manifest.stage, 3);
  EXPECT_THAT(manifest.kinds, ElementsAre("value", "exp_avg", "exp_avg_sq"));
  ASSERT_EQ(manifest.tensors.size(), 4U);
  EXPECT_EQ(manifest.tensors[0], example()[0].tensor);
  ASSERT_EQ(manifest.extents.size(), writer.order().size());
  for (std::size_t i = 0; i < manifest.extents.size(); ++i) {
    const ManifestExtent& extent = manifest.extents[i];
    const auto expected = bytes_for(writer.order()[i]);
    std::vector<std::byte> found(expected.size());
    const io::File file(path + "/" + manifest.files[extent.file].name, io::File::Mode::kRead);
    io::read_fully(file, extent.offset, found);
    EXPECT_EQ(found, expected) << i;
  }
  for (const ManifestFile& entry : manifest.files) {
    const io::File file(path + "/" + entry.name, io::File::Mode::kRead);
    std::vector<std::byte> all(file.size().size());
    io::read_fully(file, Bytes(), all);
    EXPECT_LT(entry.checksums.first_wrong(Bytes(), all).value, 0) << entry.name;
  }
  const SafetensorsFile values(path + "/model-00000-of-00001.safetensors");
  ASSERT_NE(values.find("w"), nullptr);
  EXPECT_THAT(values.find("w")->shape, ElementsAre(1500, 1001));
  EXPECT_NE(values.find("buffer:count"), nullptr);
}

TEST_F(WholeCheckpoint, LeavesTheOldOneUntilItIsWhole) {
  {
    WholeCheckpointWriter writer(folder(), "t", {example()[2]}, io_, calls_);
    writer.write(bytes_for(writer.order()[0]));
    writer.publish({});
  }
  {
    WholeCheckpointWriter writer(folder(), "t", example(), io_, calls_);
    writer.write(bytes_for(writer.order()[0]));
    EXPECT_THROW(writer.publish({}), UsageError);
  }
  EXPECT_EQ(read_manifest(folder() + "/t").tensors.size(), 1U);
  EXPECT_THAT(whole_checkpoints(folder()), ElementsAre("t"));
  int entries = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder()))
    entries += entry.is_directory() ? 1 : 0;
  EXPECT_EQ(entries, 1);
}

TEST_F(WholeCheckpoint, SaysWhichTensorHasAnotherSize) {
  WholeCheckpointWriter writer(folder(), "t", example(), io_, calls_);
  try {
    writer.write(std::vector<std::byte>(7));
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'count' (value) wanted=8 found=7"));
  }
  EXPECT_THROW(WholeCheckpointWriter(folder(), "../t", example(), io_, calls_), UsageError);
  auto twice = example();
  twice.push_back(twice.front());
  EXPECT_THROW(WholeCheckpointWriter(folder() + "2", "t", twice, io_, calls_), UsageError);
}

}  // namespace
}  // namespace strata::format
