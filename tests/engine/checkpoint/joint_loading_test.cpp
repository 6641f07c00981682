#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "engine/checkpoint/checkpoint_model.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/engine/checkpoint/weight_loader.h"

namespace strata::engine {
namespace {

using testing::all_params;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::on_ranks;
using testing::RankModel;

constexpr checkpoint::RingOptions kSmallRing{2, 4_KiB};

LoadedBytes load(RankModel& rank, const format::CheckpointIndex& checkpoint) {
  const format::WeightMap map(whole_tensors(rank.params), checkpoint.tensors(), checkpoint.path());
  const std::vector<int> params = all_params(rank);
  io::ThreadEngine io;
  return load_weights_together(*rank.model, {checkpoint.open_files(), map, params, io, kSmallRing},
                               1_B);
}

void expect_values(RankModel& rank, DType dtype) {
  for (std::size_t p = 0; p < rank.params.size(); ++p) {
    EXPECT_EQ(rank.values(static_cast<int>(p)),
              testing::expected_bytes(p, rank.params[p].numel(), dtype))
        << rank.params[p].name;
  }
}

// Gathered by weights_changed() since the start.
Bytes gathered_at_the_end(const InitReport& report) {
  for (const InitPhase& phase : report.phases()) {
    if (phase.name == "all-gather") return phase.bytes;
  }
  return {};
}

// world, stage, dtype of the weights
class JointLoading : public ::testing::TestWithParam<std::tuple<int, int, DType>> {};

TEST_P(JointLoading, GathersWhatEveryRankHasReadBesideWhatIsStillRead) {
  const auto world = std::get<0>(GetParam());
  const auto stage = std::get<1>(GetParam());
  const auto dtype = std::get<2>(GetParam());
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  const auto outcomes = on_ranks(world, [&](const auto& ranks) {
    RankModel rank(ranks, dtype, stage);
    const format::CheckpointIndex checkpoint(path);
    for (int again = 0; again < 2; ++again) {
      load(rank, checkpoint);
      rank.model->weights_changed();
      expect_values(rank, dtype);
      ranks->barrier();
    }
    Bytes expected;
    for (const Unit& unit : rank.model->weights().units()) {
      if (world == 1 || unit.id == 1) expected += Bytes(unit.resident.size()) * 2;
    }
    EXPECT_EQ(gathered_at_the_end(rank.model->init_report()), expected);
  });
  EXPECT_THAT(outcomes, Each(""));
}

INSTANTIATE_TEST_SUITE_P(Worlds, JointLoading,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(2, 3),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16)));

// The bytes of rank 1's file that are left when it is read: it ends before or after the first sync
// point.
class JointLoadingErrors : public ::testing::TestWithParam<std::uintmax_t> {};

TEST_P(JointLoadingErrors, AreThoseOfTheFirstRankOnEveryRankAndLeaveTheEngineUsable) {
  const testing::TemporaryFolder whole;
  const testing::TemporaryFolder cut;
  const std::string path = whole / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  std::filesystem::copy_file(path, cut / "model.safetensors");
  const auto outcomes = on_ranks(3, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 2);
    const format::CheckpointIndex mine(ranks->rank() == 1 ? cut / "model.safetensors" : path);
    ranks->barrier();
    if (ranks->rank() == 1) std::filesystem::resize_file(cut / "model.safetensors", GetParam());
    std::string message;
    try {
      load(rank, mine);
    } catch (const IoError& error) {
      message = error.what();
    }
    EXPECT_THAT(message, AllOf(HasSubstr("failed on rank 1"), HasSubstr("model.safetensors")));
    load(rank, format::CheckpointIndex(path));
    rank.model->weights_changed();
    expect_values(rank, DType::kFloat32);
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
}

INSTANTIATE_TEST_SUITE_P(Places, JointLoadingErrors, ::testing::Values(600U, 25000U));

TEST(JointLoadingErrors, APinnedUnitIsRefusedOnEveryRankBeforeAnythingIsStored) {
  const testing::TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  testing::write_checkpoint(path, DType::kFloat32);
  const auto outcomes = on_ranks(2, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    if (ranks->rank() == 0) rank.model->gatherer().acquire(0);
    const std::vector<std::byte> before(rank.model->weights().units()[0].shard.begin(),
                                        rank.model->weights().units()[0].shard.end());
    try {
      load(rank, format::CheckpointIndex(path));
      ADD_FAILURE() << "there is no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("failed on rank 0"), HasSubstr("'first'")));
    }
    const auto shard = rank.model->weights().units()[0].shard;
    EXPECT_TRUE(std::ranges::equal(shard, before));
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
}

class PlanGatherPoints : public ::testing::Test {
 protected:
  PlanGatherPoints() { testing::write_checkpoint(folder_ / "model.safetensors", DType::kFloat32); }

  // (units) by meeting, of the map's parameters `params`.
  std::vector<std::vector<int>> points(RankModel& rank, std::vector<int> params, Bytes enough) {
    const format::CheckpointIndex checkpoint(folder_ / "model.safetensors");
    std::vector<format::ParamSources> sources;
    for (const int param : params)
      sources.push_back(whole_tensors(rank.params)[static_cast<std::size_t>(param)]);
    const format::WeightMap map(sources, checkpoint.tensors(), checkpoint.path());
    std::vector<std::vector<int>> units;
    for (const GatherPoint& point : plan_gather_points(rank.model->weights(), map, params, enough))
      units.push_back(point.units);
    return units;
  }

  testing::TemporaryFolder folder_;
};

TEST_F(PlanGatherPoints, LeaveOutTheLastUnitsAndThoseThatAreNotWholeInTheMap) {
  const auto outcomes = on_ranks(1, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 2);
    EXPECT_THAT(points(rank, {0, 1, 2, 3, 4}, 1_B), ElementsAre(ElementsAre(0)));
    EXPECT_THAT(points(rank, {0, 1, 2, 3, 4}, 1_MiB), IsEmpty());
    EXPECT_THAT(points(rank, {0, 1, 3, 4}, 1_B), IsEmpty());
    EXPECT_THAT(points(rank, {}, 1_B), IsEmpty());
  });
  EXPECT_THAT(outcomes, Each(""));
}

TEST_F(PlanGatherPoints, AreNoneWhereAllUnitsAreSharded) {
  const auto outcomes = on_ranks(2, [&](const auto& ranks) {
    RankModel rank(ranks, DType::kFloat32, 3);
    EXPECT_THAT(points(rank, {0, 1, 2, 3, 4}, 1_B), IsEmpty());
  });
  EXPECT_THAT(outcomes, Each(""));
}

}  // namespace
}  // namespace strata::engine
