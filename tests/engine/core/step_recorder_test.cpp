#include "strata/engine/record/step_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/core/fake_model.h"

namespace strata::engine::fake {
namespace {

constexpr std::int64_t kBlock = 4096;  // elements: whole pages
constexpr int kBlocks = 4;

FakeModel recorded_model() {
  plan::ModelBuilder b;
  const int layers = b.list(0, "layers");
  for (int i = 0; i < kBlocks; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    b.param(b.module(layer, "proj", "Linear"), "weight", kBlock, DType::kFloat32);
  }
  return FakeModel(b);
}

RankOptions with(int stage, Bytes max_live, Bytes prefetch) {
  RankOptions options;
  options.engine.stage = stage;
  options.engine.max_live = max_live;
  options.engine.prefetch = prefetch;
  return options;
}

void train(FakeRank& rank, int steps) {
  const std::vector<GroupScalars> groups(1);
  for (int i = 0; i < steps; ++i) {
    rank.forward();
    rank.backward(true, [&](int p) { rank.add(p, noises(1, rank.model().numel(p))); });
    rank.engine().step(groups, 1.0, false);
  }
}

// The report of the last of some steps, on two ranks.
StepReport report_after(int steps, const RankOptions& options, bool timed = false) {
  StepReport report;
  const FakeModel model = recorded_model();
  expect_no_errors(run_ranks(2, [&](int r, auto collectives) {
    FakeRank rank(model, options, std::move(collectives));
    rank.engine().recorder().set_timed(timed);
    EXPECT_FALSE(rank.engine().step_report());
    train(rank, steps);
    if (r == 0) report = rank.engine().step_report().value();
  }));
  return report;
}

constexpr Bytes kUnitBytes{kBlock * 4};

TEST(StepReport, BytesGatheredAreTheUnitsTimesTheirUses) {
  // Room for one unit, and nothing fetched ahead: the one at the turn is kept.
  const StepReport report = report_after(3, with(3, kUnitBytes, 0_B));
  EXPECT_EQ(report.step, 3);
  EXPECT_EQ(report.counts.gathers, 2 * kBlocks - 1);
  EXPECT_EQ(report.counts.gathered, kUnitBytes * (2 * kBlocks - 1));
  EXPECT_EQ(report.counts.late_fetches, 2 * kBlocks - 1);
  EXPECT_EQ(report.counts.prefetch_hits, 0);
  EXPECT_EQ(report.counts.kept, 1);
  EXPECT_EQ(report.counts.refreshes, 0);
}

TEST(StepReport, AUnitThatWasFetchedAheadIsAHit) {
  const StepReport report = report_after(3, with(3, 64_MiB, 64_MiB));
  EXPECT_EQ(report.counts.gathers, kBlocks);
  EXPECT_EQ(report.counts.late_fetches, 1);  // nothing ran before the first
  EXPECT_EQ(report.counts.prefetch_hits, kBlocks - 1);
  EXPECT_EQ(report.counts.kept, kBlocks);
}

TEST(StepReport, EveryUnitIsReducedOnceAndRefreshedWhereItStaysWhole) {
  const StepReport sharded = report_after(2, with(3, 64_MiB, 64_MiB));
  EXPECT_EQ(sharded.counts.reductions, kBlocks);
  EXPECT_EQ(sharded.counts.reduced, kUnitBytes * kBlocks);
  EXPECT_EQ(sharded.counts.refreshed, 0_B);
  const StepReport whole = report_after(2, with(2, 64_MiB, 64_MiB));
  EXPECT_EQ(whole.counts.gathered, 0_B);
  EXPECT_EQ(whole.counts.reduced, kUnitBytes * kBlocks);
  EXPECT_EQ(whole.counts.refreshes, kBlocks);
  EXPECT_EQ(whole.counts.refreshed, kUnitBytes * kBlocks);
}

TEST(StepReport, LaterStepsAllocateNothing) {
  EXPECT_GT(report_after(1, with(3, 64_MiB, 64_MiB)).counts.device_allocations, 0);
  EXPECT_EQ(report_after(4, with(3, 64_MiB, 64_MiB)).counts.device_allocations, 0);
}

TEST(StepReport, TimesAreThereWhereTheyAreAskedForAndAddUp) {
  EXPECT_FALSE(report_after(2, with(3, 64_MiB, 64_MiB)).times);
  const StepReport report = report_after(2, with(3, 64_MiB, 64_MiB), true);
  EXPECT_GT(report.seconds, 0.0);
  const StepTimes times = report.times.value();
  for (const double part : {times.forward, times.backward, times.update}) EXPECT_GT(part, 0.0);
  EXPECT_LE(times.forward + times.backward + times.update, report.seconds);
  EXPECT_LE(times.norm + times.optimizer, times.update);
  EXPECT_LE(times.exposed(), report.seconds);
  EXPECT_GT(times.gather.seconds, 0.0);
  EXPECT_NEAR(times.gather.gb_per_s * times.gather.seconds * 1e9,
              static_cast<double>(report.counts.gathered.value) / 2, 1.0);
  EXPECT_GT(times.reduce.gb_per_s, 0.0);
  EXPECT_EQ(times.refresh.gb_per_s, 0.0);
}

TEST(StepReport, TransfersAtTheSameTimeCountOnce) {
  StepRecord record;
  record.timed = true;
  record.counts.gathered = 8000000000_B;
  record.spans = {{Activity::kGather, 0, 0_B, 1.0, 3.0},
                  {Activity::kGather, 1, 0_B, 2.0, 4.0},
                  {Activity::kGather, 2, 0_B, 5.0, 6.0},
                  {Activity::kGatherWait, 0, 0_B, 2.5, 3.0},
                  {Activity::kReduceWait, 0, 0_B, 7.0, 7.25}};
  const StepTimes times = make_step_report(record, 4).times.value();
  EXPECT_EQ(times.gather.seconds, 4.0);
  EXPECT_EQ(times.gather.gb_per_s, 1.5);  // three quarters of the bytes come from others
  EXPECT_EQ(times.gather.exposed, 0.5);
  EXPECT_EQ(times.exposed(), 0.75);
}

// --- a device that runs ahead ---

struct LateEvent final : device::TimedEvent {
  explicit LateEvent(double at) : time(at) {}
  bool done() override { return came; }
  void wait() override { came = true; }
  double seconds_since(device::TimedEvent& /*earlier*/) override { return time; }
  double time;
  bool came = false;
};

struct LateWork final : comm::Work {
  explicit LateWork(comm::WorkTimes points) : known(std::move(points)) {}
  bool done() override { return false; }
  void wait() override {}
  comm::WorkTimes times() const override { return known; }
  comm::WorkTimes known;
};

class RecorderOfOneRank : public ::testing::Test {
 protected:
  comm::LocalGroup group_{1};
  std::unique_ptr<comm::Collectives> collectives_ = group_.rank(0);
  device::CpuDevice device_;
  StepRecorder recorder_{device_, *collectives_, {}};
};

TEST_F(RecorderOfOneRank, AStepIsReadWhenTheDeviceHasComeToItsEndAndNobodyWaitsBefore) {
  const auto begin = std::make_shared<LateEvent>(2.0);
  const auto end = std::make_shared<LateEvent>(5.0);
  recorder_.begin_step(true);
  const auto gather = recorder_.begin_transfer(Activity::kGather, 0, 7_B);
  LateWork work({nullptr, begin, end});
  recorder_.started(gather, work);
  recorder_.end_step();
  recorder_.begin_step(false);
  EXPECT_EQ(recorder_.last(), nullptr);
  begin->came = true;
  recorder_.resolve(false);
  EXPECT_EQ(recorder_.last(), nullptr);
  end->came = true;
  recorder_.resolve(false);
  ASSERT_NE(recorder_.last(), nullptr);
  // The second: the call that started it, since this device is waited for in the call.
  ASSERT_EQ(recorder_.last()->spans.size(), 2U);
  EXPECT_EQ(recorder_.last()->spans[1].activity, Activity::kGatherWait);
  const StepSpan& span = recorder_.last()->spans[0];
  EXPECT_EQ(span.begin, 2.0);
  EXPECT_EQ(span.end, 5.0);
  EXPECT_EQ(span.bytes, 7_B);
}

TEST_F(RecorderOfOneRank, WhoeverAsksForTheLastStepWaitsForIt) {
  recorder_.begin_step(true);
  const auto reduce = recorder_.begin_transfer(Activity::kReduce, 3, 7_B);
  LateWork work({std::make_shared<LateEvent>(1.0), std::make_shared<LateEvent>(2.0),
                 std::make_shared<LateEvent>(3.0)});
  recorder_.started(reduce, work);
  recorder_.end_step();
  EXPECT_FALSE(make_step_report(recorder_, false, 1));
  EXPECT_TRUE(make_step_report(recorder_, true, 1));
  const std::vector<StepSpan>& spans = recorder_.last()->spans;
  ASSERT_EQ(spans.size(), 3U);
  EXPECT_EQ(spans[2].activity, Activity::kPeersReady);
  EXPECT_EQ(spans[2].end, 2.0);
}

TEST_F(RecorderOfOneRank, ASpanThatIsLetGoIsForgottenAndOneThatLastsIsWaitedFor) {
  recorder_.begin_step(true);
  recorder_.begin(Activity::kForward, 0);
  auto lasting = recorder_.begin(Activity::kGather, 1);
  recorder_.end_step();
  recorder_.resolve(false);
  EXPECT_EQ(recorder_.last(), nullptr);
  recorder_.begin_step(true);
  recorder_.end(lasting);
  recorder_.end_step();
  recorder_.resolve(false);
  ASSERT_EQ(recorder_.last()->number, 2);
}

TEST_F(RecorderOfOneRank, BetweenStepsAndInStepsWithoutTimesNothingIsRecorded) {
  EXPECT_EQ(recorder_.begin(Activity::kGather, 0), nullptr);
  recorder_.begin_step(false);
  EXPECT_EQ(recorder_.begin(Activity::kGather, 0), nullptr);
  recorder_.counts().gathers = 5;
  recorder_.end_step();
  recorder_.counts().gathers = 9;
  recorder_.begin_step(false);
  recorder_.end_step();
  recorder_.resolve(false);
  EXPECT_EQ(recorder_.last()->counts.gathers, 0);
  EXPECT_EQ(recorder_.last()->number, 2);
}

}  // namespace
}  // namespace strata::engine::fake
