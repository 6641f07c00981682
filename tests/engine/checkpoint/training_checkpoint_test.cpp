// Training continues from a checkpoint: any world size and stage loads the bits that another one
// saved. The engine names a damaged file, and a failed load changes nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/checkpoint/training_ranks.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/engine/checkpoint/training_loader.h"
#include "strata/engine/checkpoint/training_saver.h"

namespace strata::engine {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TrainedRank;

// Ring buffers of one block of checksums: small models are cut, too, where they are larger.
constexpr checkpoint::RingOptions kStaging{3, 1_MiB};

SaveRequest request_for(const std::string& folder, const std::string& tag) {
  SaveRequest request;
  request.folder = folder;
  request.tag = tag;
  request.training = R"({"note": 7})";
  return request;
}

void save(TrainedRank& rank, const SaveRequest& request) {
  io::ThreadEngine io;
  io::FolderCalls calls;
  save_training(*rank.engine, request, io, calls, kStaging);
}

void load(TrainedRank& rank, const std::string& path, const LoadRequest& request = {}) {
  io::ThreadEngine io;
  const TrainingCheckpoint checkpoint = open_training(*rank.collectives, path);
  load_training(*rank.engine, checkpoint, request, io, kStaging);
}

struct Job {
  int world;
  int stage;
};

class AcrossJobs : public ::testing::TestWithParam<std::tuple<Job, Job, DType>> {};

TEST_P(AcrossJobs, EveryBitArrives) {
  const Job saved = std::get<0>(GetParam());
  const Job loaded = std::get<1>(GetParam());
  const DType dtype = std::get<2>(GetParam());
  const testing::TemporaryFolder folder;
  EXPECT_THAT(testing::on_ranks(saved.world,
                                [&](const auto& ranks) {
                                  TrainedRank rank(ranks, dtype, saved.stage);
                                  rank.set_states(/*seed=*/1);
                                  save(rank, request_for(folder.path(), "step1"));
                                }),
              Each(""));
  EXPECT_EQ(checkpoint::latest_tag(folder.path()), "step1");
  EXPECT_THAT(testing::on_ranks(loaded.world,
                                [&](const auto& ranks) {
                                  TrainedRank rank(ranks, dtype, loaded.stage);
                                  rank.set_states(/*seed=*/2);
                                  load(rank, folder.path() + "/step1");
                                  EXPECT_EQ(rank.wrong_states(/*seed=*/1), "");
                                  ranks->barrier();
                                }),
              Each(""));
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, AcrossJobs,
    ::testing::Combine(::testing::Values(Job{1, 2}, Job{2, 3}, Job{4, 3}, Job{3, 1}),
                       ::testing::Values(Job{1, 0}, Job{2, 2}, Job{3, 3}, Job{8, 3}),
                       ::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                         DType::kFloat64)));

// One saved checkpoint of two ranks, bf16, stage 3, and the message of a load after a change.
class Damaged : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
      TrainedRank rank(ranks, DType::kBFloat16, 3);
      rank.set_states(1);
      save(rank, request_for(folder_.path(), "t"));
    });
    ASSERT_THAT(outcomes, Each(""));
  }

  std::string path(const std::string& name) const { return folder_.path() + "/t/" + name; }

  // The message of a load, by rank. The engine has other states; if `stays`, they must stay.
  std::vector<std::string> load_errors(bool stays = true, int world = 2) {
    return testing::on_ranks(world, [&](const auto& ranks) {
      TrainedRank rank(ranks, DType::kBFloat16, 3);
      rank.set_states(2);
      try {
        load(rank, folder_.path() + "/t");
      } catch (const Error&) {
        if (stays) {
          EXPECT_EQ(rank.wrong_states(2), "");
        }
        throw;
      }
    });
  }

  void flip(const std::string& file, std::int64_t offset) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(offset);
    const char byte = static_cast<char>(stream.get() ^ 4);
    stream.seekp(offset);
    stream.put(byte);
  }

  testing::TemporaryFolder folder_;
};

TEST_F(Damaged, AFlippedByteIsNamedOnEveryRank) {
  flip(path("optimizer-00001-of-00002.safetensors"), 5'000);
  EXPECT_THAT(load_errors(/*stays=*/false),
              Each(AllOf(HasSubstr("not what was written"), HasSubstr("tensor 'big' (exp_avg)"),
                         HasSubstr("optimizer-00001-of-00002.safetensors"), HasSubstr("begin=0"))));
}

// A part of the engine's values is of another state than the rest. The engine refuses to save them,
// at any stage, until a load succeeds.
TEST_F(Damaged, AnEngineThatHasLoadedAPartSavesNothingUntilItHasLoadedAll) {
  const std::string damaged = path("optimizer-00001-of-00002.safetensors");
  for (const int stage : {0, 2, 3}) {
    const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
      TrainedRank rank(ranks, DType::kBFloat16, stage);
      rank.set_states(2);
      ranks->barrier();
      if (ranks->rank() == 0) flip(damaged, 5'000);
      ranks->barrier();
      EXPECT_THROW(load(rank, folder_.path() + "/t"), FormatError);
      EXPECT_THAT(message_of<UsageError>([&] { save(rank, request_for(folder_.path(), "u")); }),
                  AllOf(HasSubstr("loading a checkpoint failed half-way"),
                        HasSubstr("not what was written")));
      ranks->barrier();
      if (ranks->rank() == 0) flip(damaged, 5'000);
      ranks->barrier();
      load(rank, folder_.path() + "/t");
      EXPECT_EQ(rank.wrong_states(1), "");
      save(rank, request_for(folder_.path(), "u"));
    });
    EXPECT_THAT(outcomes, Each("")) << "stage " << stage;
  }
}

TEST_F(Damaged, AFileThatIsCutOffIsNamedBeforeAnythingIsStored) {
  std::filesystem::resize_file(path("model-00001-of-00002.safetensors"), 1'000);
  EXPECT_THAT(load_errors(), Each(AllOf(HasSubstr("cut off"), HasSubstr("model-00001-of-00002"),
                                        HasSubstr("found=1000"))));
}

TEST_F(Damaged, AMissingFileIsNamedBeforeAnythingIsStored) {
  std::filesystem::remove(path("optimizer-00000-of-00002.safetensors"));
  EXPECT_THAT(load_errors(), Each(AllOf(HasSubstr("cannot open"), HasSubstr("optimizer-00000"))));
}

TEST_F(Damaged, AFileThatIsALinkOutOfTheFolderIsNotFollowed) {
  for (const std::string name : {"model-00001-of-00002.safetensors", "manifest.json"}) {
    std::filesystem::rename(path(name), folder_ / "outside");
    std::filesystem::create_symlink(folder_ / "outside", path(name));
    EXPECT_THAT(load_errors(), Each(AllOf(HasSubstr("leads out of its folder"), HasSubstr(name))));
    std::filesystem::rename(folder_ / "outside", path(name));
  }
}

TEST_F(Damaged, ADamagedManifestIsRefusedOnEveryRank) {
  flip(path("manifest.json"), 40);
  EXPECT_THAT(load_errors(), Each(HasSubstr("manifest")));
}

TEST_F(Damaged, AnotherModelIsRefusedByItsParameters) {
  const auto outcomes = testing::on_ranks(1, [&](const auto& ranks) {
    TrainedRank rank(ranks, DType::kBFloat16, 3, "other.");
    rank.set_states(2);
    load(rank, folder_.path() + "/t");
  });
  EXPECT_THAT(outcomes, Each(AllOf(HasSubstr("5 parameters are not in the checkpoint: other.a"),
                                   HasSubstr("5 are not in the model: a, empty"))));
}

TEST_F(Damaged, WhatBothHaveIsLoadedWhereStrictnessIsOff) {
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    TrainedRank rank(ranks, DType::kBFloat16, 3, "other.");
    rank.set_states(2);
    LoadRequest request;
    request.strict = false;
    load(rank, folder_.path() + "/t", request);
    EXPECT_EQ(rank.wrong_values(2), "");  // none in common
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
}

TEST(TrainingCheckpoint, StatesThatAreNotWantedStay) {
  const testing::TemporaryFolder folder;
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    TrainedRank rank(ranks, DType::kBFloat16, 3);
    rank.set_states(1);
    save(rank, request_for(folder.path(), "t"));
    rank.set_states(2);
    LoadRequest request;
    request.states = false;
    load(rank, folder.path() + "/t", request);
    EXPECT_EQ(rank.wrong_values(1), "");
    EXPECT_EQ(rank.wrong_moments(2), "");
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
}

TEST(TrainingCheckpoint, ATagIsReplacedWholeAndOldOnesGo) {
  const testing::TemporaryFolder folder;
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    TrainedRank rank(ranks, DType::kFloat32, 3);
    for (const unsigned seed : {1U, 2U, 3U, 4U}) {
      rank.set_states(seed);
      SaveRequest request = request_for(
          folder.path(), seed == 2 ? "a" : std::string(1, static_cast<char>('a' + seed - 1)));
      request.publish.keep = 2;
      save(rank, request);
    }
    rank.set_states(9);
    load(rank, folder.path() + "/c");
    EXPECT_EQ(rank.wrong_states(3), "");
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
  EXPECT_THAT(checkpoint::whole_checkpoints(folder.path()), ElementsAre("c", "d"));
  EXPECT_EQ(checkpoint::latest_tag(folder.path()), "d");
  EXPECT_THAT(folder.names(), ::testing::UnorderedElementsAre(".strata.lock", "c", "d", "latest"));
}

TEST(TrainingCheckpoint, RanksThatNameDifferentTagsAreTold) {
  const testing::TemporaryFolder folder;
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    TrainedRank rank(ranks, DType::kFloat32, 3);
    save(rank, request_for(folder.path(), ranks->rank() == 0 ? "one" : "two"));
  });
  EXPECT_THAT(outcomes, Each(HasSubstr("rank 0 has 'one', rank 1 has 'two'")));
  EXPECT_THAT(folder.names(), ElementsAre());
}

TEST(TrainingCheckpoint, ATagStaysInItsFolder) {
  for (const std::string tag : {"../up", "a/b", "", ".hidden", "latest"}) {
    const testing::TemporaryFolder folder;
    const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
      TrainedRank rank(ranks, DType::kFloat32, 3);
      save(rank, request_for(folder.path(), tag));
    });
    EXPECT_THAT(outcomes, Each(HasSubstr("the tag of a checkpoint is the name of a folder")));
  }
}

TEST(TrainingCheckpoint, ASecondJobThatSavesMeanwhileIsTold) {
  const testing::TemporaryFolder folder;
  io::FolderCalls calls;
  const checkpoint::NewCheckpoint first(folder.path(), "first", calls);
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    TrainedRank rank(ranks, DType::kFloat32, 3);
    save(rank, request_for(folder.path(), "second"));
  });
  EXPECT_THAT(outcomes, Each(HasSubstr("another process is saving")));
}

TEST(TrainingCheckpoint, WhatIsNoFolderIsAnErrorOnEveryRank) {
  const testing::TemporaryFolder folder;
  folder.write("file", "");
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    TrainedRank rank(ranks, DType::kFloat32, 3);
    save(rank, request_for(folder.path() + "/file", "t"));
  });
  EXPECT_THAT(outcomes, Each(HasSubstr("a file has the name")));
}

TEST(TrainingCheckpoint, TensorsBesideTheModelComeBack) {
  const testing::TemporaryFolder folder;
  const std::vector<std::int64_t> counts{3, 1, 4};
  const auto outcomes = testing::on_ranks(2, [&](const auto& ranks) {
    TrainedRank rank(ranks, DType::kFloat32, 3);
    SaveRequest request = request_for(folder.path(), "t");
    request.content.tensors = {
        {{"counts", format::TensorRole::kBuffer, {3}, DType::kInt64, false, {}},
         std::as_bytes(std::span(counts))}};
    request.content.aliases = {{"tied"}};
    request.texts = {{"script.py", "print(1)"}};
    save(rank, request);
    const auto checkpoint = open_training(*ranks, folder.path() + "/t");
    const auto tensor = checkpoint.find(format::TensorRole::kBuffer, "counts");
    EXPECT_TRUE(tensor.has_value());
    io::ThreadEngine io;
    std::vector<std::byte> bytes(whole_bytes(checkpoint, tensor.value()).size());
    read_whole(checkpoint, tensor.value(), io, bytes);
    EXPECT_EQ(bytes.size(), 24U);
    EXPECT_EQ(std::memcmp(bytes.data(), counts.data(), 24), 0);
    EXPECT_EQ(checkpoint.find(format::TensorRole::kParameter, "tied"), 0U);
    EXPECT_EQ(checkpoint.manifest().training, R"({"note":7})");
    ranks->barrier();
  });
  EXPECT_THAT(outcomes, Each(""));
  EXPECT_EQ(testing::content_of(folder / "t/script.py"), "print(1)");
}

}  // namespace
}  // namespace strata::engine
