// Ranks choose one init tier together, although one of them has less free memory than the others.
// Ranks are threads of this process, each with a device of its own.
#include "strata/torch/start/init_choice.h"

#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/device/cpu_device.h"
#include "torch/live_engines.h"

namespace strata::torch {
namespace {

using ::testing::AllOf;
using testing::config_of;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::kHere;
using testing::make_nets;
using testing::Net;
using testing::run_ranks;
using testing::values_in;
using testing::values_of;

constexpr int kWorld = 3;
constexpr int kHogged = 1;  // another program uses this rank's device
constexpr int kStage = 2;
constexpr Bytes kDevice = 512_MiB;

// Values of 22.5 MiB, beside which an engine at stage 2 with AdamW takes 30 MiB on every rank, and
// 128 MiB have to stay free.
constexpr int kBlocks = 12;

struct Crowded {
  ModelRuntime runtime;
  std::unique_ptr<device::Memory> taken;  // stands for another program's memory
};

Crowded runtime_with(Bytes free, const std::shared_ptr<comm::Collectives>& collectives) {
  Crowded crowded{make_runtime(kHere, 1, collectives), nullptr};
  auto device = std::make_shared<device::CpuDevice>(
      device::CpuDeviceOptions{.threads = 1, .memory_limit = kDevice});
  crowded.taken = device->allocate_uncharged(kDevice - free);
  crowded.runtime.device = std::move(device);
  return crowded;
}

struct Outcome {  // by rank
  std::vector<std::string> tiers;
  std::vector<std::string> reasons;  // of a rank that refused, its error's text
};

// A start in which the hogged rank has `free` bytes and the others have 256 MiB.
Outcome start_beside(Bytes free, const std::vector<Net>& nets, bool looks_at_values = false) {
  Outcome outcome{std::vector<std::string>(kWorld), std::vector<std::string>(kWorld)};
  const std::vector<at::Tensor> expected = values_of(nets[0]);
  run_ranks(kWorld, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const auto rank = static_cast<std::size_t>(collectives->rank());
    const Crowded crowded =
        runtime_with(collectives->rank() == kHogged ? free : 256_MiB, collectives);
    try {
      ShardedModel model(describe_module(*nets[rank]).input, config_of(kStage, kWorld),
                         engine::UpdateRule::kAdamW, crowded.runtime, "engine");
      outcome.tiers[rank] = model.engine().init_report().tier();
      outcome.reasons[rank] = model.engine().init_report().reason();
      if (looks_at_values) {
        const std::vector<at::Tensor> values = values_in(model);
        for (std::size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(at::equal(values[i], expected[i].to(at::kBFloat16).to(at::kFloat))) << i;
      }
      model.destroy(false);
    } catch (const OutOfMemoryError& error) {
      outcome.tiers[rank] = "refused";
      outcome.reasons[rank] = error.what();
    }
  });
  return outcome;
}

TEST(InitChoice, TakesTheFastestWayWhereEveryRankHasRoom) {
  const Outcome outcome = start_beside(256_MiB, make_nets(kWorld, kBlocks));
  EXPECT_THAT(outcome.tiers, Each("device_copy"));
}

TEST(InitChoice, AllRanksTakeTheLowerWayWhereOneHasLessRoom) {
  const std::vector<Net> nets = make_nets(kWorld, kBlocks);
  for (const at::Tensor& p : nets[2]->parameters()) p.detach().mul_(-1.0);  // rank 0's win
  const Outcome outcome = start_beside(128_MiB + 20_MiB, nets, true);
  EXPECT_THAT(outcome.tiers, Each("device_grow"));
  EXPECT_THAT(outcome.reasons, Each(AllOf(HasSubstr("device_copy lacks"), HasSubstr("on rank 1"),
                                          HasSubstr("least is free on rank 1: 148 MiB"))));
}

TEST(InitChoice, AllRanksRefuseBeforeAnythingMovesWhatOneHasNoRoomFor) {
  const std::vector<Net> nets = make_nets(kWorld, kBlocks);
  const std::vector<at::Tensor> before = values_of(nets[0]);
  const Outcome outcome = start_beside(64_MiB, nets);
  EXPECT_THAT(outcome.tiers, Each("refused"));
  EXPECT_THAT(outcome.reasons, Each(AllOf(HasSubstr("the model does not fit: rank 1 lacks"),
                                          HasSubstr("Nothing has been moved"))));
  for (const Net& net : nets) {
    const std::vector<at::Tensor> after = values_of(net);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i]));
    for (const at::Tensor& p : net->parameters()) EXPECT_TRUE(p.requires_grad());
  }
}

}  // namespace
}  // namespace strata::torch
