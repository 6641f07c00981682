// `strata diff`: checkpoints of either kind, by names, shapes, dtypes and values.
#include "strata/cli/comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/command_run.h"
#include "cli/saved_checkpoint.h"
#include "strata/io/thread_engine.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Diff : public ::testing::Test {
 protected:
  Diff() {
    saved_.write(folder_ / "a");
    other_.ranks = 3;
  }
  // Compares `a` with the present state of other_.
  CommandRun diff(std::vector<std::string> more = {}) {
    other_.write(folder_ / "b");
    std::vector<std::string> arguments{"diff", folder_ / "a", folder_ / "b"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  }

  TestFolder folder_;
  SavedCheckpoint saved_;
  SavedCheckpoint other_;
};

TEST_F(Diff, TheSameSavedByOtherRanksIsEqual) {
  const CommandRun result = diff({"--kinds"});
  EXPECT_EQ(result.code, kDone) << result.err << result.out;
  EXPECT_THAT(result.out, HasSubstr("equal: 11 tensors compared"));
  EXPECT_TRUE(diff({"--json"}).json()["equal"]);
}

TEST_F(Diff, NamesTheLargestDifferenceAndItsElement) {
  const auto value = saved_.value;
  other_.value = [value](const std::string& name, std::size_t kind, std::int64_t i) {
    const bool other = name == "layers.1.weight" && kind == 0 && (i == 6 || i == 9);
    return value(name, kind, i) + (other ? static_cast<float>(i) : 0.0F);
  };
  const CommandRun result = diff();
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.out, AllOf(HasSubstr("'layers.1.weight'"), HasSubstr("[2, 1]"),
                                HasSubstr("2 of 16"), HasSubstr("the values of 1 differ")));
  const auto json = diff({"--json"}).json();
  ASSERT_EQ(json["largest"].size(), 1U);
  EXPECT_EQ(json["largest"][0]["largest"], 9.0);
  EXPECT_EQ(json["largest"][0]["at"], 9);
  EXPECT_EQ(json["largest"][0]["a"], value("layers.1.weight", 0, 9));
  EXPECT_THAT(json["largest"][0]["place"], ElementsAre(2, 1));
}

TEST_F(Diff, OptimizerStatesCountOnlyWhenAskedFor) {
  const auto value = saved_.value;
  other_.value = [value](const std::string& name, std::size_t kind, std::int64_t i) {
    return value(name, kind, i) + (kind == 2 ? 1.0F : 0.0F);
  };
  EXPECT_EQ(diff().code, kDone);
  const CommandRun result = diff({"--kinds", "--top", "2"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.out, AllOf(HasSubstr("'layers.0.weight' (exp_avg_sq)"),
                                HasSubstr("and 1 more; --top 3 lists all")));
}

TEST_F(Diff, NamesWhatIsOnlyInOneAndOtherShapesAndDtypes) {
  other_.tensors[1].shape = {2, 8};
  other_.tensors[2].dtype = DType::kFloat16;
  other_.tensors[3].name = "layers.10.gain";
  const CommandRun result = diff();
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.out, AllOf(HasSubstr("only in A (1):\n  'layers.10.scale'"),
                                HasSubstr("only in B (1):\n  'layers.10.gain'"),
                                HasSubstr("'layers.0.weight': shape [4, 4] in A, [2, 8] in B"),
                                HasSubstr("'layers.1.weight': bfloat16 in A, float16 in B")));
  const auto json = diff({"--json"}).json();
  EXPECT_THAT(json["only_a"], ElementsAre("layers.10.scale"));
  EXPECT_EQ(json["shapes"][0]["b"], nlohmann::json({2, 8}));
}

TEST_F(Diff, ACheckpointEqualsWhatWasConsolidatedFromIt) {
  const std::string out = folder_ / "out";
  for (const char* dtype : {"as-trained", "bf16", "fp16", "fp32"}) {
    ASSERT_EQ(run({"consolidate", folder_ / "a", out, "--dtype", dtype}).code, kDone);
    for (const auto& [a, b] : {std::pair(folder_ / "a", out), {out, folder_ / "a"}}) {
      const CommandRun result = run({"diff", a, b});
      EXPECT_EQ(result.code, kDone) << dtype << result.out << result.err;
    }
  }
  ASSERT_EQ(run({"consolidate", folder_ / "a", folder_ / "half", "--dtype", "bf16"}).code, kDone);
  const CommandRun result = run({"diff", out, folder_ / "half" + "/model.safetensors"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.out, HasSubstr("'embed.weight': float32 in A, bfloat16 in B"));
}

TEST_F(Diff, FindsATiedWeightByAnyOfItsNames) {
  other_.tensors[0].name = "lm_head.weight";
  other_.tensors[0].aliases = {"embed.weight"};
  other_.value = [](const std::string& name, std::size_t kind, std::int64_t i) {
    return SavedCheckpoint().value(name == "lm_head.weight" ? "embed.weight" : name, kind, i);
  };
  EXPECT_EQ(diff().code, kDone);
}

TEST_F(Diff, SaysWhatCannotBeCompared) {
  CommandRun result = run({"diff", folder_ / "a", folder_ / "gone"});
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, HasSubstr("there is no such file or folder"));
  ASSERT_EQ(run({"consolidate", folder_ / "a", folder_ / "out"}).code, kDone);
  result = run({"diff", folder_ / "a", folder_ / "out", "--kinds"});
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, HasSubstr("only training checkpoints hold"));
  std::filesystem::create_directory(folder_ / "empty");
  result = run({"diff", folder_ / "a", folder_ / "empty"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.err, HasSubstr("a folder holds no checkpoint"));
}

template <typename T>
ElementDifference difference_of(std::vector<T> a, std::vector<T> b, DType dtype) {
  ElementDifference difference;
  DifferenceMeter().add(std::as_bytes(std::span(a)), dtype, std::as_bytes(std::span(b)), dtype,
                        std::nullopt, Numel(), difference);
  return difference;
}

TEST(DifferenceMeter, KnowsNaNAndInfinity) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(difference_of<float>({nan, inf, 0.0F, 1}, {-nan, inf, -0.0F, 1}, DType::kFloat32)
                .differing.value,
            0);
  const ElementDifference nans = difference_of<float>({1, nan, 3}, {2, 2, 3}, DType::kFloat32);
  EXPECT_EQ(nans.differing.value, 2);
  EXPECT_EQ(nans.at, Numel(1));
  EXPECT_TRUE(std::isinf(nans.largest));
  EXPECT_TRUE(std::isinf(difference_of<float>({inf}, {-inf}, DType::kFloat32).largest));
}

TEST(DifferenceMeter, ComparesIntegersExactly) {
  const std::int64_t large = std::int64_t{1} << 60;
  const auto one = difference_of<std::int64_t>({large}, {large + 1}, DType::kInt64);
  EXPECT_EQ(one.largest, 1.0);
  const auto far = difference_of<std::int64_t>({INT64_MIN}, {INT64_MAX}, DType::kInt64);
  EXPECT_EQ(far.largest, 0x1p64);
  EXPECT_EQ(difference_of<std::uint8_t>({0, 1}, {0, 0}, DType::kBool).at, Numel(1));
}

TEST(DifferenceMeter, OfFloat8KnowsOnlyWhetherItDiffers) {
  const auto eight = difference_of<std::uint8_t>({7, 8}, {7, 9}, DType::kFloat8E4M3);
  EXPECT_EQ(eight.differing.value, 1);
  EXPECT_FALSE(eight.has_values);
  EXPECT_FALSE(comparable(DType::kFloat8E4M3, DType::kFloat8E5M2));
  EXPECT_FALSE(comparable(DType::kFloat32, DType::kInt32));
  EXPECT_TRUE(comparable(DType::kInt64, DType::kInt32));
}

}  // namespace
}  // namespace strata::cli
