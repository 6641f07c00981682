#include "strata/engine/unit/agreement.h"

#include <gmock/gmock.h>

#include "engine/checkpoint/checkpoint_model.h"

namespace strata::engine {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Agreement, ReturnsWhenNobodyFailed) {
  const auto outcomes =
      testing::on_ranks(3, [](const auto& ranks) { together(*ranks, "reading", [] {}); });
  EXPECT_THAT(outcomes, Each(""));
}

TEST(Agreement, OneRanksFailureIsEveryRanksAndNamesIt) {
  const auto outcomes = testing::on_ranks(3, [](const auto& ranks) {
    EXPECT_THROW(together(*ranks, "reading the weights",
                          [&] {
                            if (ranks->rank() == 1) throw IoError("the disk is gone");
                          }),
                 IoError);
    together(*ranks, "reading the weights", [&] {
      if (ranks->rank() == 1) throw IoError("the disk is gone");
    });
  });
  EXPECT_THAT(outcomes, Each("threw: reading the weights failed on rank 1: the disk is gone"));
}

TEST(Agreement, WhatAllRanksSayIsSaidAsItIs) {
  const auto outcomes = testing::on_ranks(2, [](const auto& ranks) {
    together(*ranks, "reading", [] { throw FormatError("line one\nline two"); });
  });
  EXPECT_THAT(outcomes, Each("threw: line one\nline two"));
}

TEST(Agreement, ForeignExceptionsAreErrorsToo) {
  const auto outcomes = testing::on_ranks(2, [](const auto& ranks) {
    together(*ranks, "reading", [&] {
      if (ranks->rank() == 0) throw std::out_of_range("too far");
    });
  });
  EXPECT_THAT(outcomes, Each("threw: reading failed on rank 0: too far"));
}

}  // namespace
}  // namespace strata::engine
