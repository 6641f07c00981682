// Tests the links in a step's report, where states lie elsewhere than on the device.
#include "strata/engine/record/links.h"

#include <gtest/gtest.h>

#include "engine/core/offloaded_cases.h"
#include "offload/late_file.h"
#include "offload/store_harness.h"
#include "strata/engine/optimize/native_optimizer.h"
#include "strata/offload/nvme_store.h"

namespace strata::engine::fake {
namespace {

using memory::Tier;
using offload::Link;

constexpr Bytes kPage = offload::kPartAlignment;

// A drive of one GB/s, with so much space.
std::shared_ptr<offload::StateStore> drive_store(device::Device& device, Bytes space = 1_GiB) {
  auto file = std::make_unique<offload::LimitedFile>(
      std::make_unique<testing::LateFile>(/*seed=*/3, /*failing=*/0), space);
  offload::NvmeStoreOptions options{
      .arena = std::make_shared<offload::StagingArena>(device, kTightStaging),
      .file = std::move(file)};
  return offload::make_nvme_store(device, std::move(options));
}

RankOptions options_with(Tier states, std::shared_ptr<device::CpuDevice> device) {
  RankOptions options;
  options.engine.stage = 3;
  options.engine.late_norm = false;
  options.engine.states.tier = states;
  if (states != Tier::kDevice) options.engine.gradient_tier = Tier::kHost;
  options.device = std::move(device);
  if (states != Tier::kNvme) return options;
  options.stores = [](device::Device& d) { return Stores{drive_store(d), nullptr}; };
  return options;
}

// Bytes of one rank's states and gradients.
struct Held {
  Bytes states;
  Bytes pages;  // of the states, on a drive
  Bytes gradients;
  Bytes padding;  // of the gradients: bytes that belong to no parameter
};

Held held_by(Engine& engine) {
  Held held;
  const auto* adam = dynamic_cast<NativeOptimizer*>(engine.optimizer());
  for (const OptimizerShards::UnitShard& shard : engine.shards().units()) {
    std::vector<StateBlock> blocks = engine.weights().masters().blocks(shard.unit);
    for (const std::string_view moment : {kExpAvg, kExpAvgSq})
      blocks.push_back(adam->states().block(shard.unit, moment));
    for (const StateBlock& block : blocks) {
      const Bytes bytes = engine.weights().states().size_of(block.id);
      held.states += bytes;
      held.pages += align_up(bytes, kPage);
    }
    const Unit& unit = engine.weights().units()[static_cast<std::size_t>(shard.unit)];
    held.gradients += bytes_of(unit.layout.shard(), DType::kFloat32);
    const plan::Slot& last = unit.layout.slots().back();
    held.padding += bytes_of(unit.layout.shard() - last.offset - last.numel, DType::kFloat32);
  }
  return held;
}

// The reports of two steps in a row of a training run without errors.
struct Seen {
  StepReport before;
  StepReport after;
  Held held;
};

Seen train(const RankOptions& options, bool timed) {
  Seen seen;
  const FakeModel model(uneven_builder(DType::kBFloat16));
  expect_no_errors(run_ranks(1, [&](int, std::shared_ptr<comm::Collectives> collectives) {
    const Over over = options.device != nullptr ? Over::kLatePeers : Over::kThreads;
    FakeRank rank(model, options, joined(std::move(collectives), over, options.device));
    rank.engine().recorder().set_timed(timed);
    for (int step = 0; step < 5; ++step) {
      rank.forward();
      add_all(rank, all_gradients(model, step, 0, 0), {}, /*boundary=*/true);
      rank.engine().step(groups_of(step), 1.0, false);
      rank.settle();
      seen.before = std::move(seen.after);
      seen.after = rank.engine().step_report().value();
    }
    seen.held = held_by(rank.engine());
  }));
  return seen;
}

std::vector<Link> links_of(const LinkReport& report) {
  std::vector<Link> links;
  for (const LinkUse& use : report.uses) links.push_back(use.link);
  return links;
}

TEST(LinkReport, HasWhatTheConfigurationImplies) {
  const Seen seen = train(options_with(Tier::kNvme, comm::conformance::late_device(0)), true);
  const LinkReport& report = seen.after.links.value();
  ASSERT_EQ(links_of(report), (std::vector{Link::kUp, Link::kDown, Link::kRead, Link::kWrite}));
  // Gradients come up for the update alone, which leaves out their padding.
  const Bytes gradients = seen.held.gradients - seen.held.padding;
  EXPECT_EQ(report.uses[0].bytes, seen.held.states + gradients);
  EXPECT_EQ(report.uses[1].bytes, seen.held.states + seen.held.gradients);
  // Some of the states stay in memory, but the drive gets each of them; states that are still in
  // memory at the end of a step are written in the next.
  EXPECT_GT(report.uses[2].bytes, 0_B);
  EXPECT_LT(report.uses[2].bytes, seen.held.pages);
  EXPECT_LE(report.uses[3].bytes, seen.held.pages + kTightStaging);
  EXPECT_GE(report.uses[3].bytes, seen.held.pages - kTightStaging);
  ASSERT_EQ(report.drive_writes.size(), 1U);
  EXPECT_EQ(report.drive_writes[0].folder, "/drive");
  const offload::StoreCounts& stores = seen.after.counts.stores;
  EXPECT_GT(stores.parts, 0);
  EXPECT_LE(stores.parts_ready, stores.parts);
  EXPECT_GE(stores.seconds_waited, 0.0);
  EXPECT_GE(report.copy_wait.value(), 0.0);
  for (const LinkUse& use : report.uses) {
    EXPECT_GT(use.seconds.value(), 0.0);
    EXPECT_GT(use.of_limit().value(), 0.0);
    EXPECT_LE(use.of_limit().value(), 1.0);
  }
  for (const LinkUse& drive : std::span(report.uses).subspan(2))
    EXPECT_NEAR(drive.gb_per_s.value(), 1.0, 1e-3);
}

TEST(LinkReport, OfAStepThatWasNotTimedHasTheSameBytes) {
  const auto told = [](bool timed) {
    return train(options_with(Tier::kNvme, comm::conformance::late_device(0)), timed)
        .after.links.value();
  };
  const LinkReport timed = told(true);
  const LinkReport plain = told(false);
  EXPECT_FALSE(plain.copy_wait);
  for (std::size_t i : {0U, 1U}) EXPECT_EQ(plain.uses[i].bytes, timed.uses[i].bytes);
  EXPECT_GT(plain.uses[3].bytes, 0_B);
  EXPECT_FALSE(plain.uses[0].gb_per_s);
  EXPECT_TRUE(plain.uses[3].gb_per_s) << "the times of drives cost nothing";
}

TEST(LinkReport, HasNoDrivesWhereNoneAreUsedAndNoCopiesWhereHostAndDeviceAreOne) {
  const LinkReport host =
      train(options_with(Tier::kHost, comm::conformance::late_device(0)), true).after.links.value();
  EXPECT_EQ(links_of(host), (std::vector{Link::kUp, Link::kDown}));
  EXPECT_TRUE(host.drive_writes.empty());
  const Seen cpu = train(options_with(Tier::kNvme, nullptr), true);
  EXPECT_EQ(links_of(cpu.after.links.value()), (std::vector{Link::kRead, Link::kWrite}));
  EXPECT_FALSE(cpu.after.links->copy_wait);
  EXPECT_FALSE(train(options_with(Tier::kDevice, nullptr), true).after.links);
}

TEST(LinkReport, WearGrowsByWhatAStepWrites) {
  const Seen seen = train(options_with(Tier::kNvme, nullptr), false);
  const Bytes grown =
      seen.after.links->drive_writes[0].written - seen.before.links->drive_writes[0].written;
  // A write that is in flight at the end of a step begins in that step and counts in the next.
  EXPECT_LE(grown.value, (seen.held.pages + kTightStaging).value);
  EXPECT_GE(grown.value, (seen.held.pages - kTightStaging).value);
}

TEST(LinkReport, HasNoLimitOfADriveThatIsFull) {
  RankOptions options = options_with(Tier::kNvme, nullptr);
  options.stores = [](device::Device& d) { return Stores{drive_store(d, 8_MiB), nullptr}; };
  const LinkReport report = train(options, false).after.links.value();
  EXPECT_TRUE(report.uses[1].gb_per_s);
  EXPECT_FALSE(report.uses[1].limit_gb_per_s);
  EXPECT_FALSE(report.uses[1].of_limit());
}

TEST(LinkReport, CountsCopiesAtTheSameTimeOnce) {
  StepRecord record;
  record.timed = true;
  record.counts.uploaded = 8000000000_B;
  record.counts.stores.written = 5000000000_B;  // some of it is still on its way
  record.spans = {{Activity::kUpload, -1, 4000000000_B, 1.0, 3.0},
                  {Activity::kUpload, -1, 4000000000_B, 2.0, 5.0},
                  {Activity::kCopyWait, -1, 0_B, 2.0, 2.5},
                  {Activity::kDriveWrite, -1, 3000000000_B, -1.0, 1.0}};
  const LinkReport report = make_link_report(record, /*copies=*/true, /*drives=*/true);
  EXPECT_EQ(report.uses[0].seconds, 4.0);
  EXPECT_EQ(report.uses[0].gb_per_s, 2.0);
  EXPECT_EQ(report.uses[1].seconds, 0.0);
  EXPECT_FALSE(report.uses[1].gb_per_s);
  EXPECT_EQ(report.uses[3].bytes, 5000000000_B);
  EXPECT_EQ(report.uses[3].gb_per_s, 1.5);
  EXPECT_EQ(report.copy_wait, 0.5);
}

TEST(LinkSpeed, IsThatOfBothWaysAndHoldsNothing) {
  device::LateDevice device;
  const std::int64_t charges = device.ledger()->charges(Tier::kDevice);
  const std::int64_t waits = device.host_waits()->count();
  const LinkSpeed speed = measure_link(device);
  EXPECT_GT(speed.up_gb_per_s, 0.0);
  EXPECT_GT(speed.down_gb_per_s, 0.0);
  EXPECT_EQ(device.ledger()->charges(Tier::kDevice), charges);
  EXPECT_EQ(device.ledger()->held(Tier::kHost), 0_B);
  EXPECT_EQ(device.host_waits()->count(), waits);
}

}  // namespace
}  // namespace strata::engine::fake
