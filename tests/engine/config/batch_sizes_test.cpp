#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;

constexpr std::nullopt_t kNone = std::nullopt;

TEST(BatchSizes, AreCompletedFromAnySufficientPart) {
  const BatchSizes whole{.train_batch_size = 24, .micro_batch_size = 2, .accumulation_steps = 3};
  EXPECT_EQ(whole.complete(4), whole);
  EXPECT_EQ(BatchSizes({24, 2, kNone}).complete(4), whole);
  EXPECT_EQ(BatchSizes({24, kNone, 3}).complete(4), whole);
  EXPECT_EQ(BatchSizes({kNone, 2, 3}).complete(4), whole);
  EXPECT_EQ(BatchSizes({24, kNone, kNone}).complete(4), (BatchSizes{24, 6, 1}));
  EXPECT_EQ(BatchSizes({kNone, 2, kNone}).complete(4), (BatchSizes{8, 2, 1}));
}

std::string refusal(const BatchSizes& given, int world_size) {
  try {
    given.complete(world_size);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(BatchSizes, ThatContradictAreRefusedWithTheEquation) {
  EXPECT_EQ(
      refusal({32, 2, 3}, 4),
      "train_batch_size: does not equal train_micro_batch_size_per_gpu x "
      "gradient_accumulation_steps x world size: 32 != 2 x 3 x 4; correct one of them or remove "
      "it and let the others give it; found train_batch_size: 32, "
      "train_micro_batch_size_per_gpu: 2, gradient_accumulation_steps: 3, world size: 4");
}

TEST(BatchSizes, ThatDoNotComeOutEvenAreRefused) {
  EXPECT_THAT(refusal({10, 4, kNone}, 2), HasSubstr("10 != 4 x 1 x 2"));
  EXPECT_THAT(refusal({10, kNone, 4}, 2), HasSubstr("10 != 1 x 4 x 2"));
  EXPECT_THAT(refusal({7, kNone, kNone}, 2), HasSubstr("7 != 3 x 1 x 2"));
  EXPECT_THAT(refusal({2, kNone, kNone}, 4), HasSubstr("2 != 0 x 1 x 4"));
  EXPECT_THAT(refusal({4, 8, kNone}, 1), HasSubstr("4 != 8 x 0 x 1"));
}

TEST(BatchSizes, NeedABatchOrAMicroBatch) {
  EXPECT_THAT(refusal({kNone, kNone, 4}, 2),
              HasSubstr("train_batch_size: wanted it or train_micro_batch_size_per_gpu"));
  EXPECT_THAT(refusal({}, 2), HasSubstr("train_batch_size: not given"));
}

TEST(BatchSizes, BeyondAnyBatchAreRefusedNotWrapped) {
  EXPECT_THAT(refusal({kNone, 2147483647, 2147483647}, 2147483647),
              HasSubstr("not given != 2147483647 x 2147483647 x 2147483647"));
}

}  // namespace
}  // namespace strata::engine
