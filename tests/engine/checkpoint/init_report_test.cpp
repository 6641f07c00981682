#include "strata/engine/record/init_report.h"

#include <gmock/gmock.h>

#include "device/limited_device.h"
#include "strata/device/cpu_device.h"
#include "strata/engine/record/links.h"

namespace strata::engine {
namespace {

TEST(InitReport, AddsUpPhasesOfOneName) {
  device::CpuDevice device;
  InitReport report(device);
  InitReport::Phase(report, "read", 10_B).moved(10_B);
  InitReport::Phase(report, "all-gather", 5_B).moved(5_B);
  InitReport::Phase(report, "read", 3_B).moved(3_B);
  ASSERT_EQ(report.phases().size(), 2U);
  EXPECT_EQ(report.phases()[0].name, "read");
  EXPECT_EQ(report.phases()[0].bytes, 13_B);
  EXPECT_EQ(report.phases()[1].bytes, 5_B);
  EXPECT_GE(report.phases()[0].seconds, 0.0);
}

TEST(InitReport, TellsTheLastOfEveryPhase) {
  device::CpuDevice device;
  InitReport report(device);
  Bytes last;
  report.progress = [&](const std::string& phase, Bytes done, Bytes total) {
    EXPECT_EQ(phase, "read");
    EXPECT_EQ(total, 1000_B);
    last = done;
  };
  InitReport::Phase phase(report, "read", 1000_B);
  for (int i = 0; i < 10; ++i) phase.moved(100_B);
  EXPECT_EQ(last, 1000_B);
}

TEST(InitReport, KnowsTheMostThatTheDeviceHeld) {
  device::LimitedDevice device(64_MiB);
  InitReport report(device);
  {
    const auto memory = device.allocate(40_MiB, memory::Kind::kWeights);
    report.sample();
  }
  report.sample();
  EXPECT_EQ(report.device_growth(), 40_MiB);
}

TEST(InitReport, ALinkThatIsNoneHasNoSpeed) {
  device::CpuDevice device;
  EXPECT_EQ(measure_link(device).up_gb_per_s, 0.0);
  EXPECT_EQ(measure_link(device).down_gb_per_s, 0.0);
}

}  // namespace
}  // namespace strata::engine
