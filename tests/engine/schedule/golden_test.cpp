// Rates, momenta and loss scales against tables that DeepSpeed's own classes wrote
// (make_golden.py). The parameters go through the configuration, so that names and defaults are
// compared too.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "strata/engine/config/config.h"
#include "strata/engine/schedule/loss_scaler.h"
#include "strata/engine/schedule/schedule.h"

namespace strata::engine {
namespace {

using nlohmann::json;

const json& golden() {
  static const json kTables = json::parse(std::ifstream(STRATA_GOLDEN));
  return kTables;
}

Scheduler scheduler_of(const json& golden_case) {
  const json document = {
      {"scheduler", {{"type", golden_case["type"]}, {"params", golden_case["params"]}}}};
  const Config config = Config::parse(document.dump());
  const ScheduledOptimizer optimizer{golden_case["group_lrs"].get<std::vector<double>>(), true};
  return Scheduler(make_schedule(config.scheduler->params, optimizer));
}

void expect_rates(const json& row, const Rates& rates) {
  const std::size_t groups = row[1].size();
  ASSERT_EQ(rates.lrs.size(), groups);
  for (std::size_t g = 0; g < groups; ++g) EXPECT_DOUBLE_EQ(rates.lrs[g], row[1][g].get<double>());
  ASSERT_EQ(rates.betas.has_value(), row.size() == 4);
  for (std::size_t g = 0; rates.betas && g < groups; ++g) {
    EXPECT_DOUBLE_EQ((*rates.betas)[g].beta1, row[2][g].get<double>());
    EXPECT_DOUBLE_EQ((*rates.betas)[g].beta2, row[3][g].get<double>());
  }
}

TEST(Schedulers, GiveTheRatesAndMomentaOfDeepSpeed) {
  for (const json& golden_case : golden()["schedules"]) {
    Scheduler scheduler = scheduler_of(golden_case);
    Rates rates = scheduler.initial().value();
    for (const json& row : golden_case["rows"]) {
      SCOPED_TRACE(golden_case["type"].dump() + golden_case["params"].dump() + row[0].dump());
      while (scheduler.last_iteration() < row[0].get<std::int64_t>()) rates = scheduler.step();
      expect_rates(row, rates);
    }
  }
}

TEST(Schedulers, ContinueFromTheirState) {
  for (const json& golden_case : golden()["schedules"]) {
    SCOPED_TRACE(golden_case["type"].dump() + golden_case["params"].dump());
    const json& rows = golden_case["rows"];
    const json& row = rows[rows.size() - 1];
    Scheduler scheduler = scheduler_of(golden_case);
    scheduler.set_last_iteration(row[0].get<std::int64_t>() - 1);
    EXPECT_FALSE(scheduler.initial().has_value());
    expect_rates(row, scheduler.step());
  }
}

LossScaleParams scale_params(const json& args) {
  return {.fixed = 0.0,
          .initial = args["init_scale"].get<double>(),
          .window = args["scale_window"].get<std::int64_t>(),
          .hysteresis = args["delayed_shift"].get<std::int64_t>(),
          .consecutive_hysteresis = args["consecutive_hysteresis"].get<bool>(),
          .minimum = args["min_scale"].get<double>()};
}

TEST(LossScaler, MovesAsDeepSpeedsDoes) {
  bool one_raised = false;
  for (const json& golden_case : golden()["scalers"]) {
    SCOPED_TRACE(golden_case.dump());
    LossScaler scaler(scale_params(golden_case["args"]));
    const auto overflows = golden_case["overflows"].get<std::string>();
    const auto scales = golden_case["scales"].get<std::vector<double>>();
    for (std::size_t step = 0; step < scales.size(); ++step) {
      scaler.update(overflows[step] == 'x');
      ASSERT_EQ(scaler.scale(), scales[step]) << "step " << step;
    }
    if (!golden_case["raised_at_end"].get<bool>()) continue;
    one_raised = true;
    EXPECT_THROW(scaler.update(true), LossScaleError);
  }
  EXPECT_TRUE(one_raised) << "the tables hold no sequence that ends at the minimum";
}

}  // namespace
}  // namespace strata::engine
