#include "strata/engine/record/step_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/core/fake_model.h"

namespace strata::engine::fake {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class StepTraceFile : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) / (std::string("trace-") + info->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return (folder_ / "trace.json").string(); }
  // Trains on two ranks; returns rank 0's trace().problem().
  std::string train(int stage, int steps, const std::string& path) const {
    RankOptions options;
    options.engine.stage = stage;
    options.engine.trace = path;
    options.engine.trace_steps = 2;
    std::string problem;
    expect_no_errors(run_ranks(2, [&](int r, auto collectives) {
      FakeRank rank(model_, options, std::move(collectives));
      const std::vector<GroupScalars> groups(3);
      for (int i = 0; i < steps; ++i) {
        rank.forward();
        rank.backward(true, [&](int p) { rank.add(p, noises(1, model_.numel(p))); });
        rank.engine().step(groups, 1.0, false);
      }
      rank.engine().end_trace();
      EXPECT_TRUE(rank.engine().trace().over());
      if (r == 0) problem = rank.engine().trace().problem();
    }));
    return problem;
  }
  json read() const {
    std::ifstream file(path());
    return json::parse(file);
  }

  const FakeModel model_{small_builder(DType::kBFloat16)};
  std::filesystem::path folder_;
};

TEST_F(StepTraceFile, HasSpansOfEveryUnitOnEveryRankForTheStepsAfterTheWarmUp) {
  EXPECT_EQ(train(3, 6, path()), "");
  const json trace = read();
  std::map<std::pair<int, std::string>, std::set<std::string>> units;  // by rank and activity
  std::set<int> steps;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    EXPECT_GE(event.at("dur").get<double>(), 0.0);
    EXPECT_GE(event.at("ts").get<double>(), 0.0);
    steps.insert(event.at("args").at("step").get<int>());
    units[{event.at("pid").get<int>(), event.at("cat").get<std::string>()}].insert(
        event.at("name").get<std::string>());
  }
  EXPECT_EQ(steps, (std::set{3, 4}));
  for (const int rank : {0, 1}) {
    for (const plan::UnitSpec& unit : model_.plan.units) {
      // Units whose weights do not change stay gathered from step to step.
      EXPECT_EQ((units[{rank, "gather"}].contains(unit.name)), unit.trainable) << unit.name;
      EXPECT_EQ((units[{rank, "gather wait"}].contains(unit.name)), unit.trainable) << unit.name;
      EXPECT_EQ((units[{rank, "reduce"}].contains(unit.name)), unit.trainable) << unit.name;
      EXPECT_EQ((units[{rank, "optimizer"}].contains(unit.name)), unit.trainable) << unit.name;
    }
    EXPECT_EQ((units[{rank, "backward pass"}].size()), 1U);
  }
}

TEST_F(StepTraceFile, OfARunThatEndsSoonerHasWhatRankZeroDid) {
  EXPECT_EQ(train(2, 3, path()), "");
  std::set<int> ranks;
  const json trace = read();
  for (const json& event : trace.at("traceEvents")) ranks.insert(event.at("pid").get<int>());
  EXPECT_EQ(ranks, std::set{0});
}

TEST_F(StepTraceFile, IsNotThereForARunThatEndsBeforeTheFirstOfItsSteps) {
  EXPECT_THAT(train(3, 2, path()), HasSubstr("within step 3"));
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(StepTraceFile, ThatCannotBeWrittenStopsNoTraining) {
  EXPECT_THAT(train(3, 5, (folder_ / "none" / "trace.json").string()),
              HasSubstr("none/trace.json"));
}

// (name, track) of the spans, and the names of tracks
std::pair<std::map<std::string, int>, std::map<int, std::string>> tracks_of(const json& trace) {
  std::pair<std::map<std::string, int>, std::map<int, std::string>> result;
  for (const json& event : trace.at("traceEvents")) {
    const int track = event.at("tid").get<int>();
    const std::string name = event.at("name");
    if (event.at("ph") == "X") result.first[name] = track;
    if (name == "thread_name") result.second[track] = event.at("args").at("name");
  }
  return result;
}

TEST(StepTrace, SpansThatOverlapGetTracksSideBySideAndThoseWithinOthersDoNot) {
  StepRecord record;
  record.number = 3;
  record.timed = true;
  record.epoch = 1e9;
  record.spans = {{Activity::kForward, 0, 0_B, 1.0, 9.0},
                  {Activity::kForward, 1, 0_B, 1.0, 2.0},
                  {Activity::kGather, 2, 600_B, 1.0, 3.0},
                  {Activity::kGather, 3, 600_B, 2.0, 4.0},
                  {Activity::kGather, 4, 600_B, 3.0, 5.0}};
  const std::vector<std::string> labels{"model", "a", "b", "c", "d"};
  const std::string text = trace_text_of(5, 3, std::span(&record, 1), labels);
  const json trace = json::parse(chrome_trace(std::span(&text, 1)));
  auto [spans, names] = tracks_of(trace);
  EXPECT_EQ(spans["model"], spans["a"]);
  EXPECT_NE(spans["b"], spans["c"]);
  EXPECT_EQ(spans["b"], spans["d"]);
  EXPECT_EQ(names[spans["a"]], "compute");
  EXPECT_EQ(names[spans["b"]], "gathers");
  EXPECT_EQ(names[spans["c"]], "gathers (2)");
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("name") != "b") continue;
    EXPECT_EQ(event.at("pid"), 5);
    EXPECT_EQ(event.at("args").at("bytes"), 600);
    EXPECT_EQ(event.at("args").at("GB/s"), 600 * 2.0 / 3 / 2.0 * 1e-9);
  }
}

// A gather for the next step may end within it, and each step's times are by a clock of its own.
TEST(StepTrace, SpansOfTwoStepsThatOverlapGetTracksSideBySide) {
  std::vector<StepRecord> records(2);
  records[0].epoch = 1000.0;
  records[0].spans = {{Activity::kGather, 0, 0_B, 1.0, 3.0}};
  records[1].epoch = 1000.5;
  records[1].spans = {{Activity::kGather, 1, 0_B, 0.25, 1.5}};
  const std::string text = trace_text_of(0, 2, records, {"a", "b"});
  const auto [spans, names] = tracks_of(json::parse(chrome_trace(std::span(&text, 1))));
  EXPECT_NE(spans.at("a"), spans.at("b"));
}

TEST(StepTrace, WhatGoesOverLinksHasTracksOfItsOwnAndAllItsBytesGoOverThem) {
  StepRecord record;
  record.epoch = 1000.0;
  record.spans = {{Activity::kUpload, -1, 600_B, 1.0, 3.0},
                  {Activity::kCopyWait, -1, 0_B, 1.0, 2.0},
                  {Activity::kDriveWrite, -1, 500_B, -2.0, 3.0}};  // began in the step before
  const std::string text = trace_text_of(0, 1, std::span(&record, 1), {});
  const json trace = json::parse(chrome_trace(std::span(&text, 1)));
  auto [spans, names] = tracks_of(trace);
  EXPECT_EQ(names[spans["upload"]], "uploads");
  EXPECT_EQ(names[spans["copy wait"]], "waits");
  EXPECT_EQ(names[spans["drive write"]], "drive writes");
  for (const json& event : trace.at("traceEvents")) {
    const std::string name = event.at("name");
    if (name != "upload" && name != "drive write") continue;
    EXPECT_EQ(event.at("args").at("GB/s"), name == "upload" ? 300 * 1e-9 : 100 * 1e-9);
    EXPECT_EQ(event.at("ts"), name == "upload" ? 1e6 : 0.0) << "nothing is before the first";
  }
}

TEST(StepTrace, RanksAreBroughtTogetherByTheClocksOfTheirHosts) {
  std::vector<std::string> texts;
  for (const double epoch : {1000.5, 1000.0}) {
    StepRecord record;
    record.timed = true;
    record.epoch = epoch;
    record.spans = {{Activity::kForwardPass, -1, 0_B, 0.25, 1.0}};
    texts.push_back(trace_text_of(static_cast<int>(texts.size()), 2, std::span(&record, 1), {}));
  }
  texts.emplace_back();  // a rank beyond those that are in the file
  std::map<int, double> begins;
  const json trace = json::parse(chrome_trace(texts));
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X") begins[event.at("pid")] = event.at("ts");
  }
  EXPECT_EQ(begins, (std::map<int, double>{{0, 750000.0}, {1, 250000.0}}));
}

}  // namespace
}  // namespace strata::engine::fake
