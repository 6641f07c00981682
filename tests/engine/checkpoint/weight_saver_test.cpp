#include "strata/engine/checkpoint/weight_saver.h"

#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>

#include "engine/checkpoint/checkpoint_model.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/format/checkpoint_index.h"

namespace strata::engine {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::RankModel;

void fill(RankModel& rank) {
  for (std::size_t p = 0; p < rank.params.size(); ++p) {
    const Numel numel = rank.params[p].numel();
    const auto bytes = testing::expected_bytes(p, numel, rank.params[p].dtype);
    rank.model->weights().store(static_cast<int>(p), Numel(), numel, bytes.data(),
                                rank.params[p].dtype);
  }
  rank.model->weights_changed();
}

// Every parameter under its name; "big" as two tensors of its rows.
std::vector<SavedTensor> saved_tensors(const RankModel& rank, DType dtype) {
  std::vector<SavedTensor> tensors;
  for (int p = 0; p < static_cast<int>(rank.params.size()); ++p) {
    const plan::ParamSpec& param = rank.params[static_cast<std::size_t>(p)];
    if (param.name == "big") {
      tensors.push_back({{"big.0", dtype, {77, 13}}, {{p, Numel(), Numel(77 * 13)}}});
      tensors.push_back({{"big.1", dtype, {700, 13}}, {{p, Numel(77 * 13), Numel(700 * 13)}}});
    } else {
      tensors.push_back({{param.name, dtype, param.shape}, {{p, Numel(), param.numel()}}});
    }
  }
  return tensors;
}

std::vector<std::byte> read_tensor(const format::CheckpointIndex& checkpoint,
                                   const std::string& name) {
  const format::CheckpointTensor* tensor = checkpoint.find(name);
  STRATA_ASSERT(tensor != nullptr);
  std::vector<std::byte> bytes(tensor->info.bytes.size());
  if (!bytes.empty()) {
    io::ThreadEngine()
        .read(checkpoint.files()[tensor->file].file(), tensor->info.offset, bytes)
        ->wait();
  }
  return bytes;
}

class WeightSaverWorlds : public ::testing::TestWithParam<std::tuple<int, int, DType>> {};

TEST_P(WeightSaverWorlds, WritesWhatTheShardsHold) {
  const auto world = std::get<0>(GetParam());
  const auto stage = std::get<1>(GetParam());
  const auto dtype = std::get<2>(GetParam());
  const testing::TemporaryFolder folder;
  const auto outcomes = testing::on_ranks(world, [&](const auto& ranks) {
    RankModel rank(ranks, dtype, stage);
    fill(rank);
    io::ThreadEngine io;
    WeightSaverOptions options;
    options.shard_max = 8_KiB;
    options.staging = {2, 1_KiB};
    auto tensors = saved_tensors(rank, dtype);
    tensors.push_back({{"buffer", DType::kInt64, {3}}, {}});
    WeightSaver saver(*rank.model, folder.path(), tensors, io, options);
    saver.write_pieces();
    const std::vector<std::int64_t> buffer{1, 2, 3};
    saver.write(tensors.size() - 1, std::as_bytes(std::span(buffer)));
    saver.finish();
    EXPECT_LE(rank.device->ledger()->peak(memory::Tier::kHost), 2_KiB);
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
  const format::CheckpointIndex checkpoint(folder.path());
  EXPECT_GT(checkpoint.files().size(), 1U);
  const auto params = testing::uneven_params(dtype);
  EXPECT_EQ(read_tensor(checkpoint, "a"), testing::expected_bytes(0, params[0].numel(), dtype));
  EXPECT_EQ(read_tensor(checkpoint, "last"), testing::expected_bytes(4, params[4].numel(), dtype));
  std::vector<std::byte> big = read_tensor(checkpoint, "big.0");
  const std::vector<std::byte> rest = read_tensor(checkpoint, "big.1");
  big.insert(big.end(), rest.begin(), rest.end());
  EXPECT_EQ(big, testing::expected_bytes(3, params[3].numel(), dtype));
  EXPECT_EQ(checkpoint.find("empty")->info.numel, Numel());
  EXPECT_EQ(read_tensor(checkpoint, "buffer").size(), 24U);
}

INSTANTIATE_TEST_SUITE_P(Worlds, WeightSaverWorlds,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(2, 3),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16,
                                                              DType::kFloat16)));

TEST(WeightSaver, ReadsSeveralPiecesIntoOneTensor) {
  const testing::TemporaryFolder folder;
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    fill(rank);
    io::ThreadEngine io;
    WeightSaver saver(*rank.model, folder.path(),
                      {{{"mixed", DType::kFloat32, {4}},
                        {{4, Numel(3), Numel(2)}, {0, Numel(), Numel(1)}, {4, Numel(), Numel(1)}}}},
                      io);
    saver.write_pieces();
    saver.finish();
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
  const auto bytes = read_tensor(format::CheckpointIndex(folder.path()), "mixed");
  std::vector<float> values(4);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  EXPECT_EQ(values, (std::vector<float>{testing::value_at(4, 3), testing::value_at(4, 4),
                                        testing::value_at(0, 0), testing::value_at(4, 0)}));
}

TEST(WeightSaver, WhatRankZeroCannotWriteFailsOnEveryRankAndTheOldCheckpointStays) {
  const testing::TemporaryFolder folder;
  folder.write("model.safetensors", "the old one");
  const auto outcomes = testing::on_ranks(3, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    fill(rank);
    io::ThreadEngine io;
    WeightSaver saver(*rank.model, folder.path(), {{{"never given", DType::kFloat32, {9}}, {}}},
                      io);
    saver.write_pieces();
    saver.finish();
  });
  EXPECT_THAT(outcomes, Each(HasSubstr("failed on rank 0")));
  EXPECT_THAT(folder.names(), ::testing::ElementsAre("model.safetensors"));
  EXPECT_EQ(testing::content_of(folder / "model.safetensors"), "the old one");
}

TEST(WeightSaver, AFolderThatCannotBeMadeIsAnErrorOnEveryRank) {
  const testing::TemporaryFolder folder;
  folder.write("file", "");
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    io::ThreadEngine io;
    WeightSaver saver(*rank.model, folder / "file", saved_tensors(rank, DType::kFloat32), io);
  });
  EXPECT_THAT(outcomes, Each(HasSubstr("failed on rank 0")));
}

TEST(WeightSaver, RefusesPiecesThatDoNotFillTheirTensor) {
  const testing::TemporaryFolder folder;
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    io::ThreadEngine io;
    WeightSaver saver(*rank.model, folder.path(),
                      {{{"half", DType::kFloat32, {5}}, {{4, Numel(), Numel(3)}}}}, io);
  });
  EXPECT_THAT(outcomes, Each(HasSubstr("'half'")));
}

}  // namespace
}  // namespace strata::engine
