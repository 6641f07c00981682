#include "strata/format/sharded_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/faulty_calls.h"
#include "io/temporary_folder.h"
#include "strata/format/checkpoint_index.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"

namespace strata::testing {
namespace {

using format::plan_shards;
using format::ShardedWriter;
using format::TensorSpec;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

std::vector<TensorSpec> tensors_of_bytes(std::initializer_list<std::int64_t> bytes) {
  std::vector<TensorSpec> tensors;
  for (const std::int64_t count : bytes) {
    tensors.push_back({fmt::format("t{}", tensors.size()), DType::kUInt8, {count}});
  }
  return tensors;
}

TEST(ShardPlan, OneFileWhenAllFitsAndWhenThereIsNothing) {
  EXPECT_THAT(plan_shards(tensors_of_bytes({4, 6}), 10_B).files, ElementsAre("model.safetensors"));
  EXPECT_THAT(plan_shards({}, 10_B).files, ElementsAre("model.safetensors"));
}

TEST(ShardPlan, BeginsAFileWhenTheNextTensorWouldNotFit) {
  const auto plan = plan_shards(tensors_of_bytes({4, 6, 1, 9, 2}), 10_B);
  EXPECT_THAT(plan.tensors, ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4)));
  EXPECT_THAT(plan.files,
              ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                          "model-00003-of-00003.safetensors"));
  EXPECT_EQ(plan.total, 22_B);
}

TEST(ShardPlan, ATensorLargerThanAShardHasAFileOfItsOwn) {
  const auto plan = plan_shards(tensors_of_bytes({3, 50, 3, 0, 3}), 10_B);
  EXPECT_THAT(plan.tensors, ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2, 3, 4)));
}

TEST(ShardPlan, RefusesALimitOfNothing) {
  EXPECT_THAT(message_of<UsageError>([] { plan_shards({}, 0_B); }), HasSubstr("found=0"));
}

TEST(ShardPlan, KnowsTheNamesItGives) {
  EXPECT_TRUE(format::is_shard_name("model-00001-of-00003.safetensors"));
  EXPECT_TRUE(format::is_shard_name("model-100000-of-100000.safetensors"));
  EXPECT_TRUE(format::is_shard_name("pytorch_model-00001-of-00003.bin"));
  for (const char* name : {"pytorch_model-00001-of-00003.safetensors", "model-00001-of-00003.bin",
                           "model-1-of-00003.safetensors", "model-00001-of-00003.safetensors.bak",
                           "model-00001.safetensors", "xmodel-00001-of-00003.safetensors",
                           "model.safetensors", "adapter-00001-of-00003.safetensors"}) {
    EXPECT_FALSE(format::is_shard_name(name)) << name;
  }
}

class Sharded : public ::testing::Test {
 protected:
  std::unique_ptr<ShardedWriter> begin(std::vector<TensorSpec> tensors, Bytes shard_max) {
    return std::make_unique<ShardedWriter>(folder_ / "out", std::move(tensors), engine_,
                                           format::ShardedWriterOptions{.shard_max = shard_max});
  }

  // Every tensor is filled with bytes from a pattern that `seed` and its place give.
  void save(const std::vector<TensorSpec>& tensors, Bytes shard_max, unsigned seed) {
    const auto writer = begin(tensors, shard_max);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto data = content(tensors[i], i, seed);
      const std::size_t half = data.size() / 2;
      writer->write(i, Bytes(half), std::span(data).subspan(half))->wait();
      writer->write(i, 0_B, std::span(data).first(half))->wait();
    }
    writer->finish();
  }

  static std::vector<std::byte> content(const TensorSpec& tensor, std::size_t i, unsigned seed) {
    return patterned_bytes(static_cast<std::size_t>(tensor.shape[0]),
                           seed + static_cast<unsigned>(i));
  }

  void expect_loads(const std::vector<TensorSpec>& tensors, unsigned seed) {
    const format::CheckpointIndex index(folder_ / "out");
    ASSERT_EQ(index.tensors().size(), tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const format::CheckpointTensor* tensor = index.find(tensors[i].name);
      ASSERT_NE(tensor, nullptr);
      std::vector<std::byte> read(tensor->info.bytes.size());
      io::read_fully(index.files()[tensor->file].file(), tensor->info.offset, read);
      ASSERT_EQ(read, content(tensors[i], i, seed));
      ASSERT_EQ(index.files()[tensor->file].metadata().at("format"), "pt");
    }
  }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "out")) {
      found.push_back(entry.path().filename().string());
    }
    return found;
  }

  TemporaryFolder folder_;
  std::shared_ptr<FaultyCalls> calls_ = std::make_shared<FaultyCalls>(8U);
  io::ThreadEngine engine_{{.threads = 2}, calls_};
};

TEST_F(Sharded, WritesOneFileWithoutIndexWhenOneSuffices) {
  const auto tensors = tensors_of_bytes({4, 6});
  save(tensors, 10_B, 1);
  EXPECT_THAT(names(), UnorderedElementsAre("model.safetensors"));
  expect_loads(tensors, 1);
}

TEST_F(Sharded, WritesShardsAndAnIndexWithTheTotalSize) {
  const auto tensors = tensors_of_bytes({4, 6, 9, 1, 2});
  save(tensors, 10_B, 1);
  EXPECT_THAT(names(), UnorderedElementsAre(
                           "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                           "model-00003-of-00003.safetensors", "model.safetensors.index.json"));
  const auto index =
      nlohmann::json::parse(content_of(folder_ / "out/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 22);
  EXPECT_EQ(index["weight_map"]["t2"], "model-00002-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"].size(), 5U);
  expect_loads(tensors, 1);
}

// Each save must load as itself, whatever lay there before, and leave files of the user alone.
TEST_F(Sharded, LeavesNothingOfAnEarlierSaveThatALaterLoadCouldTake) {
  const auto tensors = tensors_of_bytes({4, 6, 9, 1, 2});
  std::filesystem::create_directories(folder_ / "out");
  folder_.write("out/config.json", "{}");
  folder_.write("out/training.bin", "the user's");
  for (const char* name :
       {"model-00001-of-00009.safetensors.0123456789abcdef.partial", "pytorch_model.bin",
        "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.0123456789abcdef.partial"})
    folder_.write(std::string("out/") + name, "rest of another save");
  unsigned seed = 0;
  for (const Bytes from : {100_B, 10_B, 6_B}) {
    for (const Bytes to : {100_B, 10_B, 6_B}) {
      save(tensors, from, ++seed);
      save(tensors, to, ++seed);
      expect_loads(tensors, seed);
      const auto plan = plan_shards(tensors, to);
      std::vector<std::string> wanted = plan.files;
      wanted.emplace_back("config.json");
      wanted.emplace_back("training.bin");
      if (plan.sharded()) wanted.emplace_back("model.safetensors.index.json");
      EXPECT_THAT(names(), ::testing::UnorderedElementsAreArray(wanted));
    }
  }
}

TEST_F(Sharded, TheEarlierCheckpointStaysWholeUntilTheEnd) {
  const auto tensors = tensors_of_bytes({4, 6, 9});
  save(tensors, 10_B, 1);
  {
    const auto writer = begin(tensors, 10_B);
    const auto data = patterned_bytes(4, 70);
    writer->write(0, 0_B, data)->wait();
    expect_loads(tensors, 1);
    EXPECT_THAT(message_of<UsageError>([&] { writer->finish(); }), HasSubstr("tensor='t1'"));
  }
  expect_loads(tensors, 1);
  EXPECT_EQ(names().size(), 3U);
}

TEST_F(Sharded, AFullDiskLeavesTheEarlierCheckpointWhole) {
  const auto tensors = tensors_of_bytes({4, 6, 9});
  save(tensors, 10_B, 1);
  calls_->fail_at(2_B, -ENOSPC);
  EXPECT_THROW(save(tensors, 6_B, 2), IoError);
  expect_loads(tensors, 1);
  EXPECT_EQ(names().size(), 3U);
}

TEST_F(Sharded, RefusesTwoTensorsOfOneNameInDifferentShards) {
  auto tensors = tensors_of_bytes({6, 6});
  tensors[1].name = "t0";
  EXPECT_THAT(message_of<UsageError>([&] { begin(tensors, 6_B); }), HasSubstr("tensor=t0"));
}

TEST_F(Sharded, SaysWhenTheFolderCannotBeMade) {
  folder_.write("out", "a file");
  EXPECT_THAT(message_of<IoError>([&] { begin(tensors_of_bytes({1}), 10_B); }),
              HasSubstr("cannot make a folder: path=" + folder_ / "out"));
}

}  // namespace
}  // namespace strata::testing
