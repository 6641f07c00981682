#include "strata/engine/unit/agreement.h"

#include <gmock/gmock.h>

#include <typeinfo>

#include "engine/checkpoint/checkpoint_model.h"

namespace strata::engine {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Agreement, ReturnsWhenNobodyFailed) {
  const auto outcomes =
      testing::on_ranks(3, [](const auto& ranks) { agree_after(*ranks, "reading", [] {}); });
  EXPECT_THAT(outcomes, Each(""));
}

TEST(Agreement, OneRanksFailureIsEveryRanksAndNamesIt) {
  const auto outcomes = testing::on_ranks(3, [](const auto& ranks) {
    EXPECT_THROW(agree_after(*ranks, "reading the weights",
                             [&] {
                               if (ranks->rank() == 1) throw IoError("the disk is gone");
                             }),
                 IoError);
    agree_after(*ranks, "reading the weights", [&] {
      if (ranks->rank() == 1) throw IoError("the disk is gone");
    });
  });
  EXPECT_THAT(outcomes, Each("threw: reading the weights failed on rank 1: the disk is gone"));
}

// Rank 1 fails with this class; every rank must see it.
template <typename Class>
void expect_class_on_every_rank() {
  const auto outcomes = testing::on_ranks(2, [](const auto& ranks) {
    try {
      agree_on_outcome(
          *ranks, "reading",
          ranks->rank() == 1 ? failure_of(std::make_exception_ptr(Class("the cause"))) : Failure());
    } catch (const Error& error) {
      EXPECT_EQ(typeid(error), typeid(Class));
      throw;
    }
  });
  EXPECT_THAT(outcomes, Each("threw: reading failed on rank 1: the cause"));
}

TEST(Agreement, CarriesEveryClassOfErrors) {
  expect_class_on_every_rank<ConfigError>();
  expect_class_on_every_rank<FormatError>();
  expect_class_on_every_rank<IoError>();
  expect_class_on_every_rank<CommError>();
  expect_class_on_every_rank<OutOfMemoryError>();
  expect_class_on_every_rank<DeviceError>();
  expect_class_on_every_rank<UsageError>();
  expect_class_on_every_rank<NumericsError>();
  expect_class_on_every_rank<InternalError>();
  expect_class_on_every_rank<Error>();
}

TEST(Agreement, WhatAllRanksSayIsSaidAsItIs) {
  const auto outcomes = testing::on_ranks(2, [](const auto& ranks) {
    agree_after(*ranks, "reading", [] { throw FormatError("line one\nline two"); });
  });
  EXPECT_THAT(outcomes, Each("threw: line one\nline two"));
}

TEST(Agreement, ForeignExceptionsAreErrorsToo) {
  const auto outcomes = testing::on_ranks(2, [](const auto& ranks) {
    agree_after(*ranks, "reading", [&] {
      if (ranks->rank() == 0) throw std::out_of_range("too far");
    });
  });
  EXPECT_THAT(outcomes, Each("threw: reading failed on rank 0: too far"));
}

}  // namespace
}  // namespace strata::engine
