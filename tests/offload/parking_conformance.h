// Every StateStore must pass this typed suite, in which its memory of the device serves other uses
// for a while. The harnesses are those of state_store_conformance.h.
#pragma once

#include <vector>

#include "io/temporary_folder.h"
#include "offload/state_store_conformance.h"

namespace strata::offload {

template <typename Harness>
class ParkingConformance : public StateStoreConformance<Harness> {
 protected:
  static constexpr bool kParks = Harness::kTier == memory::Tier::kDevice;
};

TYPED_TEST_SUITE_P(ParkingConformance);

TYPED_TEST_P(ParkingConformance, WhatComesBackHasItsBitsAndOtherKindsStayed) {
  std::vector<BlockId> moments;
  for (const Bytes bytes : {0_B, 5000_B, 9001_B}) moments.push_back(this->add("moment", bytes));
  moments.push_back(this->add("added later", 3000_B));
  const BlockId master = this->store_->add("master", 4000_B, memory::Kind::kMasterWeights);
  for (const bool pinned : {true, false}) {
    for (std::size_t i = 0; i < moments.size(); ++i) {
      const auto seed = static_cast<std::uint32_t>(i) + (pinned ? 10U : 20U);
      this->write(moments[i], this->random_content(this->store_->size_of(moments[i]), seed));
    }
    this->write(master, this->random_content(4000_B, 1));
    const Bytes charged = this->harness_.charged(memory::Kind::kOptimizerState);
    this->store_->offload_states(memory::Kind::kOptimizerState, pinned);
    this->store_->offload_states(memory::Kind::kOptimizerState, pinned);
    EXPECT_EQ(this->harness_.charged(memory::Kind::kOptimizerState), this->kParks ? 0_B : charged);
    EXPECT_EQ(this->read(master), this->random_content(4000_B, 1));
    if (this->kParks) {
      EXPECT_THAT(
          testing::message_of<UsageError>([&] { this->store_->fetch(moments[1], Access::kRead); }),
          ::testing::HasSubstr("call reload_states() first"));
    }
    this->store_->reload_states();
    this->store_->reload_states();
    EXPECT_EQ(this->harness_.charged(memory::Kind::kOptimizerState), charged);
    for (std::size_t i = 0; i < moments.size(); ++i) {
      const auto seed = static_cast<std::uint32_t>(i) + (pinned ? 10U : 20U);
      EXPECT_EQ(this->read(moments[i]),
                this->random_content(this->store_->size_of(moments[i]), seed));
    }
  }
}

TYPED_TEST_P(ParkingConformance, ALeasedBlockKeepsItsKindWhereItIs) {
  if (!this->kParks) return;
  const BlockId block = this->add("layers.3.exp_avg", 5000_B);
  this->write(block, this->random_content(5000_B, 2));
  {
    const auto lease = this->store_->fetch(block, Access::kRead);
    EXPECT_THAT(testing::message_of<UsageError>(
                    [&] { this->store_->offload_states(memory::Kind::kOptimizerState, true); }),
                ::testing::HasSubstr("layers.3.exp_avg"));
  }
  EXPECT_EQ(this->read(block), this->random_content(5000_B, 2));
}

REGISTER_TYPED_TEST_SUITE_P(ParkingConformance, WhatComesBackHasItsBitsAndOtherKindsStayed,
                            ALeasedBlockKeepsItsKindWhereItIs);

}  // namespace strata::offload
