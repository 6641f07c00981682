#include "strata/engine/checkpoint/weight_loader.h"

#include <gmock/gmock.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <tuple>

#include "engine/checkpoint/checkpoint_model.h"
#include "io/faulty_calls.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

using testing::all_params;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::masters_of;
using testing::RankModel;

constexpr checkpoint::RingOptions kSmallRing{2, 4_KiB};
// Buffers of two blocks of direct reads, so that some batches begin and end within blocks.
constexpr checkpoint::RingOptions kBlockRing{3, 8_KiB};

Bytes load(RankModel& rank, const std::string& path,
           const checkpoint::RingOptions& staging = kSmallRing,
           checkpoint::ReadWay way = checkpoint::ReadWay::kAuto) {
  Bytes read;
  agree_after(*rank.collectives, "reading the weights", [&] {
    const format::CheckpointIndex checkpoint(path);
    const format::WeightMap map(whole_tensors(rank.params), checkpoint.tensors(), path);
    io::ThreadEngine io;
    const std::vector<int> params = all_params(rank);
    read = load_weights(*rank.model, {checkpoint.open_files(), map, params, io, staging, way}).read;
  });
  rank.model->weights_changed();
  return read;
}

// world, stage, dtype of the file, dtype of the weights
class WeightLoader : public ::testing::TestWithParam<std::tuple<int, int, DType, DType>> {};

TEST_P(WeightLoader, FillsEveryParameterOnEveryRank) {
  const auto world = std::get<0>(GetParam());
  const auto stage = std::get<1>(GetParam());
  const auto file_dtype = std::get<2>(GetParam());
  const auto dtype = std::get<3>(GetParam());
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, file_dtype);
  const auto outcomes = testing::on_ranks(world, [&](const auto& ranks) {
    RankModel rank(ranks, dtype, stage);
    const Bytes read = load(rank, path);
    EXPECT_LE(read * ranks->world_size(), Bytes(std::filesystem::file_size(path)) * 2);
    for (std::size_t p = 0; p < rank.params.size(); ++p) {
      EXPECT_EQ(rank.values(static_cast<int>(p)),
                testing::expected_bytes(p, rank.params[p].numel(), dtype))
          << rank.params[p].name;
    }
    EXPECT_EQ(rank.device->ledger()->peak(memory::Tier::kHost), 8_KiB) << "the ring";
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, WeightLoader,
    ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(2, 3),
                       ::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                       ::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16)));

// The checkpoint with `bytes` more in its header: the data lie that much further on.
void shift_data(const std::string& path, std::size_t bytes) {
  std::string content = testing::content_of(path);
  std::uint64_t header = 0;
  std::memcpy(&header, content.data(), sizeof(header));
  content.insert(sizeof(header) + header, bytes, ' ');
  header += bytes;
  std::memcpy(content.data(), &header, sizeof(header));
  std::ofstream(path, std::ios::binary) << content;
}

// world, dtype of the weights, bytes by which the tensors lie beside where writers put them
class WeightLoaderWays : public ::testing::TestWithParam<std::tuple<int, DType, std::size_t>> {};

TEST_P(WeightLoaderWays, GiveTheSameBits) {
  const auto world = std::get<0>(GetParam());
  const auto dtype = std::get<1>(GetParam());
  const auto shift = std::get<2>(GetParam());
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  shift_data(path, shift);
  const auto outcomes = testing::on_ranks(world, [&](const auto& ranks) {
    for (const checkpoint::ReadWay way :
         {checkpoint::ReadWay::kBuffered, checkpoint::ReadWay::kDirect}) {
      RankModel rank(ranks, dtype, 3);
      load(rank, path, kBlockRing, way);
      const auto& reading = rank.model->init_report().reading;
      ASSERT_TRUE(reading.has_value());
      EXPECT_EQ(reading->direct,
                way == checkpoint::ReadWay::kDirect && reading->figures.direct_offered);
      for (std::size_t p = 0; p < rank.params.size(); ++p) {
        EXPECT_EQ(rank.values(static_cast<int>(p)),
                  testing::expected_bytes(p, rank.params[p].numel(), dtype))
            << rank.params[p].name << " direct " << reading->direct;
      }
      ranks->barrier();
    }
  });
  EXPECT_THAT(outcomes, Each(""));
}

INSTANTIATE_TEST_SUITE_P(Worlds, WeightLoaderWays,
                         ::testing::Combine(::testing::Values(1, 3),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Values(0U, 1U, 4U, 3604U)));

TEST(WeightLoaderWay, SystemsThatRefuseDirectTransfersAreReadThroughTheCache) {
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  const auto calls = std::make_shared<testing::FaultyCalls>(7U);
  calls->fail_direct(-EINVAL);
  const auto outcomes = testing::on_ranks(1, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    const format::CheckpointIndex checkpoint(path);
    const format::WeightMap map(whole_tensors(rank.params), checkpoint.tensors(), path);
    io::ThreadEngine io({.piece = 5000_B, .threads = 2, .queue_max = 4}, calls);
    const std::vector<int> params = all_params(rank);
    load_weights(*rank.model, {checkpoint.open_files(), map, params, io, kBlockRing,
                               checkpoint::ReadWay::kDirect});
    rank.model->weights_changed();
    EXPECT_EQ(calls->direct_bytes(), 0_B);
    EXPECT_EQ(calls->direct_calls() > 0, rank.model->init_report().reading->direct);
    EXPECT_EQ(rank.values(3), testing::expected_bytes(3, rank.params[3].numel(), DType::kFloat32));
  });
  EXPECT_THAT(outcomes, Each(""));
}

TEST(WeightLoaderWay, BuffersOfLessThanTwoBlocksAreFilledThroughTheCache) {
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  const auto outcomes = testing::on_ranks(1, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    load(rank, path, kSmallRing, checkpoint::ReadWay::kDirect);
    EXPECT_FALSE(rank.model->init_report().reading->direct);
  });
  EXPECT_THAT(outcomes, Each(""));
}

// For each position that a load reached, the number of times that it had begun before.
std::vector<int> begun_before_places(RankModel& rank, const std::string& path,
                                     std::span<const int> params) {
  const format::CheckpointIndex checkpoint(path);
  const format::WeightMap map(whole_tensors(rank.params), checkpoint.tensors(), path);
  io::ThreadEngine io;
  int begun = 0;
  std::vector<int> before;
  const checkpoint::SyncPoints points{.places = {{0, Bytes()}, {0, 600_B}, {1, Bytes()}},
                                      .reached = [&](std::size_t) { before.push_back(begun); },
                                      .begun = [&] { ++begun; }};
  load_weights(*rank.model, {checkpoint.open_files(), map, params, io, kSmallRing}, &points);
  before.push_back(begun);
  return before;
}

TEST(WeightLoaderSyncPoints, ALoadBeginsOnceAndBeforeItReachesAnyPlace) {
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  const auto outcomes = testing::on_ranks(1, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    EXPECT_THAT(begun_before_places(rank, path, all_params(rank)), Each(1));
    EXPECT_THAT(begun_before_places(rank, path, {}), Each(1));  // nothing to read
  });
  EXPECT_THAT(outcomes, Each(""));
}

TEST(WeightLoaderMasters, TakeTheFilesOwnValue) {
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  {
    // 1 + 2^-20 is 1 in bfloat16
    const io::File file(path, io::File::Mode::kReadWrite);
    const format::CheckpointIndex checkpoint(path);
    const float value = 1.0F + 0x1p-20F;
    io::ThreadEngine()
        .write(file, checkpoint.find("a")->info.offset, std::as_bytes(std::span(&value, 1)))
        ->wait();
  }
  const auto outcomes = testing::on_ranks(1, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kBFloat16, 3);
    load(rank, path);
    ASSERT_EQ(rank.model->weights().master_form(0), plan::MasterForm::kRemainder);
    EXPECT_EQ(masters_of(*rank.model, 0).front(), 1.0F + 0x1p-20F);
  });
  EXPECT_THAT(outcomes, Each(""));
}

// Elements of this rank's shards whose masters are not their weights.
std::int64_t masters_apart(Engine& engine) {
  std::int64_t apart = 0;
  for (const Unit& unit : engine.weights().units()) {
    if (engine.weights().master_form(unit.id) != plan::MasterForm::kRemainder) continue;
    const std::vector<float> masters = masters_of(engine, unit.id);
    std::vector<kernels::BFloat16> rounded(masters.size());
    std::memcpy(rounded.data(), unit.shard.data(), unit.shard.size());
    for (std::size_t i = 0; i < masters.size(); ++i)
      apart += masters[i] == kernels::to_float(rounded[i]) ? 0 : 1;
  }
  return apart;
}

TEST(WeightLoaderMasters, OfAnEarlierLoadAreReplacedToTheLastElement) {
  const testing::TemporaryFolder folder;
  testing::write_checkpoint(folder / "model.safetensors", DType::kBFloat16);
  for (const int world : {1, 3}) {
    const auto outcomes = testing::on_ranks(world, [&](const auto& ranks) {
      RankModel rank(ranks, DType::kBFloat16, 2);
      Weights& weights = rank.model->weights();
      for (const int param : all_params(rank)) {
        const Numel numel = weights.param(param).numel();
        const std::vector<float> thirds(numel.size(), 1.0F / 3.0F);
        weights.store(param, Numel(), numel, std::as_bytes(std::span(thirds)).data(),
                      DType::kFloat32);
      }
      EXPECT_GT(masters_apart(*rank.model), 0);
      load(rank, folder / "model.safetensors");
      EXPECT_EQ(masters_apart(*rank.model), 0);
      ranks->barrier();
    });
    EXPECT_THAT(outcomes, Each(""));
  }
}

TEST(OwedMasters, AreTakenOnceWithNeighboursAsOne) {
  OwedMasters owed;
  const auto add = [&](int unit, int begin, int end) {
    owed.push_back({unit, Numel(begin), Numel(end)});
  };
  add(1, 20, 30);
  add(0, 0, 5);
  add(1, 0, 10);
  add(1, 10, 20);
  add(0, 6, 8);
  std::vector<std::tuple<int, std::int64_t, std::int64_t>> taken;
  for (const auto& [unit, begin, end] : take_joined(owed))
    taken.emplace_back(unit, begin.value, end.value);
  EXPECT_THAT(taken, ::testing::ElementsAre(std::tuple(0, 0, 5), std::tuple(0, 6, 8),
                                            std::tuple(1, 0, 30)));
  EXPECT_TRUE(take_joined(owed).empty());
}

TEST(WeightLoaderErrors, AFileTruncatedOnOneRankIsAnErrorOnEveryRank) {
  const testing::TemporaryFolder whole;
  const testing::TemporaryFolder cut;
  testing::write_checkpoint(whole / "model.safetensors", DType::kFloat32);
  std::filesystem::copy_file(whole / "model.safetensors", cut / "model.safetensors");
  std::filesystem::resize_file(cut / "model.safetensors", 2000);
  const auto outcomes = testing::on_ranks(3, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    load(rank, (ranks->rank() == 1 ? cut : whole).path());
  });
  EXPECT_THAT(outcomes, Each(AllOf(HasSubstr("failed on rank 1"), HasSubstr("model.safetensors"))));
}

TEST(WeightLoaderErrors, AFileThatShrinksAfterItsHeaderWasReadIsAnErrorOnEveryRank) {
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    const format::CheckpointIndex checkpoint(path);
    const format::WeightMap map(whole_tensors(rank.params), checkpoint.tensors(), path);
    ranks->barrier();
    if (ranks->rank() == 0) std::filesystem::resize_file(path, 4096);
    ranks->barrier();
    io::ThreadEngine io;
    const std::vector<int> params = all_params(rank);
    agree_after(*ranks, "reading the weights", [&] {
      load_weights(*rank.model, {checkpoint.open_files(), map, params, io, kSmallRing});
    });
  });
  EXPECT_THAT(outcomes, Each(HasSubstr("failed on rank")));
}

TEST(WeightLoaderRing, ThatIsKeptServesTheNextLoadAlsoAfterOneThatFailed) {
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  const std::string cut = folder / "cut.safetensors";
  std::filesystem::copy_file(path, cut);
  const auto outcomes = testing::on_ranks(1, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    const format::CheckpointIndex damaged(cut);
    const format::CheckpointIndex checkpoint(path);
    std::filesystem::resize_file(cut, 4096);
    io::ThreadEngine io;
    const std::vector<int> params = all_params(rank);
    std::optional<checkpoint::TransferRing> ring;
    const auto load_from = [&](const format::CheckpointIndex& index) {
      const format::WeightMap map(whole_tensors(rank.params), index.tensors(), index.path());
      LoadSource source{index.open_files(), map, params, io, kSmallRing};
      source.kept_ring = &ring;
      return load_weights(*rank.model, source);
    };
    EXPECT_THROW(load_from(damaged), IoError);
    EXPECT_GT(load_from(checkpoint).read, Bytes());
    EXPECT_EQ(load_from(checkpoint).way, checkpoint::ReadWay::kBuffered) << "buffers are too small";
    EXPECT_EQ(rank.device->ledger()->peak(memory::Tier::kHost), 8_KiB) << "one ring";
    rank.model->weights_changed();
    for (std::size_t p = 0; p < rank.params.size(); ++p) {
      EXPECT_EQ(rank.values(static_cast<int>(p)),
                testing::expected_bytes(p, rank.params[p].numel(), DType::kFloat32));
    }
  });
  EXPECT_THAT(outcomes, Each(""));
}

}  // namespace
}  // namespace strata::engine
