#include "strata/engine/pass_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <typename Call>
std::string refusal_of(Call&& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void run_backward(PassState& state) {
  state.require_backward_may_begin();
  state.begin_backward();
  state.end_backward();
}

TEST(PassState, ANewPassStartsWithTheFirstForwardSinceABackward) {
  PassState state;
  EXPECT_TRUE(state.begin_forward());
  EXPECT_FALSE(state.begin_forward()) << "evaluation between two steps is one pass";
  run_backward(state);
  run_backward(state);  // the graph again
  EXPECT_TRUE(state.begin_forward());
}

TEST(PassState, BackwardNeedsAForwardOfThisMicroStep) {
  PassState state;
  const auto backward = [&] { state.require_backward_may_begin(); };
  EXPECT_THAT(refusal_of(backward), HasSubstr("without a forward pass"));
  state.begin_forward();
  state.begin_backward();
  EXPECT_THAT(refusal_of(backward), HasSubstr("while a backward pass is running"));
  state.end_backward();
  state.end_micro_step();
  EXPECT_THAT(refusal_of(backward), HasSubstr("without a forward pass"));
}

TEST(PassState, AForwardAfterTheBackwardIsGoodForTheNextMicroStep) {
  PassState state;
  state.begin_forward();
  run_backward(state);
  state.begin_forward();
  state.end_micro_step();
  run_backward(state);
  state.end_micro_step();
}

TEST(PassState, AMicroStepNeedsABackwardOfItsOwnAndAStepOneSinceTheLast) {
  PassState state;
  const auto micro_step = [&] { state.end_micro_step(); };
  const auto step = [&] { state.require_gradients(); };
  const auto refused = HasSubstr("without a backward pass since the last step");
  EXPECT_THAT(refusal_of(micro_step), refused);
  EXPECT_THAT(refusal_of(step), refused);
  state.begin_forward();
  run_backward(state);
  state.end_micro_step();
  EXPECT_THAT(refusal_of(micro_step), refused);
  state.require_gradients();
  state.end_step();
  EXPECT_THAT(refusal_of(step), refused);
}

TEST(PassState, DroppedGradientsStillEndTheirMicroStep) {
  PassState state;
  state.begin_forward();
  run_backward(state);
  state.drop_gradients();
  EXPECT_THAT(refusal_of([&] { state.require_gradients(); }), HasSubstr("without a backward"));
  state.end_micro_step();
  EXPECT_THAT(refusal_of([&] { state.end_micro_step(); }), HasSubstr("without a backward"));
}

TEST(PassState, AfterAFailedUpdateOnlyALoadHelps) {
  PassState state;
  state.fail_update("the disk is full");
  const auto refusal = refusal_of([&] { state.require_intact_weights(); });
  EXPECT_THAT(refusal, AllOf(HasSubstr("load the weights again"), HasSubstr("the disk is full")));
  state.weights_loaded();
  state.require_intact_weights();
}

}  // namespace
}  // namespace strata::engine
