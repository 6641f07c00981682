#include "strata/engine/config/digest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/config/parsing.h"

namespace strata::engine {
namespace {

TEST(Digest, IsTheSameForOneMeaningInTwoSpellings) {
  EXPECT_EQ(
      parsed(R"({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})").digest(),
      parsed(R"({"zero_optimization": {"contiguous_gradients": true, "stage": 2.0}})").digest());
}

TEST(Digest, NamesTheFirstPathThatDiffers) {
  const auto a =
      parsed(R"({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}})").digest();
  const auto b =
      parsed(R"({"gradient_clipping": 0.5, "zero_optimization": {"stage": 3}})").digest();
  EXPECT_EQ(first_difference(a, b), (Difference{"zero_optimization.stage", "2", "3"}));
  EXPECT_EQ(first_difference(a, a), std::nullopt);
}

TEST(Digest, HoldsOptimizerAndSchedulerParameters) {
  const auto with = [](const std::string& params) {
    return parsed(R"({"optimizer": {"type": "AdamW", "params": )" + params + "}}").digest();
  };
  EXPECT_EQ(with("{}"), with(R"({"lr": 0.001, "betas": [0.9, 0.999]})"));
  EXPECT_EQ(first_difference(with("{}"), with(R"({"lr": 0.01})")),
            (Difference{"optimizer.params.lr", "0.001", "0.01"}));
  EXPECT_EQ(first_difference(parsed("{}").digest(), with("{}"))->left, "not set");
}

TEST(Digest, HoldsTheCompletedBatch) {
  Config a = parsed(R"({"train_batch_size": 8})");
  Config b = parsed(R"({"train_micro_batch_size_per_gpu": 4})");
  EXPECT_NE(a.digest(), b.digest());
  a.complete_batch(2);
  b.complete_batch(2);
  EXPECT_EQ(a.digest(), b.digest());
}

}  // namespace
}  // namespace strata::engine
