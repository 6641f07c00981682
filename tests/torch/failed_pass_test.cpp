// A device fails in the middle of a pass: the first error reaches the caller, the process goes on,
// and the engine says afterwards why it cannot go on.
#include <gmock/gmock.h>

#include <memory>

#include "device/losable_device.h"
#include "strata/base/error.h"
#include "strata/torch/scoped_call.h"
#include "torch/live_engines.h"

namespace strata::torch {
namespace {

using device::LosableDevice;
using testing::config_of;
using ::testing::HasSubstr;
using testing::kHere;
using testing::make_nets;
using testing::Net;
using testing::run_ranks;
using ::testing::ThrowsMessage;

// One rank's model at stage 3 on such a device, whose scopes are timed.
struct Rank {
  Rank(const Net& net, const std::shared_ptr<comm::Collectives>& collectives)
      : description(describe_module(*net)), device(std::make_shared<LosableDevice>()) {
    ModelRuntime runtime = make_runtime(kHere, 1, collectives);
    runtime.device = device;
    model =
        std::make_shared<ShardedModel>(description.input, config_of(3, collectives->world_size()),
                                       engine::UpdateRule::kAdamW, runtime, "engine");
    scopes = std::make_shared<ModuleScopes>(model, description);
    model->engine().recorder().set_timed(true);
  }

  at::Tensor forward(const Net& net, const std::function<void()>& in_backward) {
    const ScopedCall call(scopes);
    at::Tensor x = at::ones({2, 8}, at::TensorOptions().dtype(at::kBFloat16));
    model->begin_forward();
    for (const auto& block : *net->list) {
      x = call(*block->as<::torch::nn::Linear>(), x);
      // Runs within the backward of the block after this one.
      x.register_hook([in_backward](const at::Tensor& gradient) {
        in_backward();
        return gradient;
      });
    }
    return x.sum();
  }

  ModuleDescription description;
  std::shared_ptr<LosableDevice> device;
  std::shared_ptr<ShardedModel> model;
  std::shared_ptr<ModuleScopes> scopes;
};

TEST(FailedPass, ADeviceThatIsLostInBackwardIsToldAndEndsNoProcess) {
  const std::vector<Net> nets = make_nets(2, 3, 8);
  run_ranks(2, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const Net& net = nets[static_cast<std::size_t>(collectives->rank())];
    Rank rank(net, collectives);
    int hooks = 0;
    const at::Tensor loss = rank.forward(net, [&] {
      if (++hooks < 2) return;
      rank.device->lose(true);
      throw std::runtime_error("the cause");
    });
    rank.model->begin_backward();
    EXPECT_THAT([&] { loss.backward(); },
                ThrowsMessage<std::runtime_error>(HasSubstr("the cause")));
    rank.model->abandon_backward();
    for (int turn = 0; turn < 2; ++turn) {
      EXPECT_THAT([&] { rank.model->begin_forward(); },
                  ThrowsMessage<DeviceError>(HasSubstr("the device is lost")));
    }
    EXPECT_THAT([&] { rank.model->step({}); },
                ThrowsMessage<DeviceError>(HasSubstr("the device is lost")));
    rank.device->lose(false);  // how the engine's own parts end is theirs to test
  });
}

TEST(FailedPass, ABackwardThatTheUserEndedLeavesAnEngineThatGoesOn) {
  const std::vector<Net> nets = make_nets(2, 3, 8);
  run_ranks(2, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const Net& net = nets[static_cast<std::size_t>(collectives->rank())];
    Rank rank(net, collectives);
    bool fails = true;
    const auto run = [&] {
      const at::Tensor loss = rank.forward(net, [&] {
        if (fails) throw std::runtime_error("the cause");
      });
      rank.model->begin_backward();
      loss.backward();
      rank.model->end_backward();
    };
    EXPECT_THAT(run, ThrowsMessage<std::runtime_error>(HasSubstr("the cause")));
    rank.model->abandon_backward();
    fails = false;
    run();
    const std::vector<engine::GroupScalars> groups(1);
    EXPECT_TRUE(rank.model->step(groups)->applied);
    rank.model->destroy(false);
  });
}

TEST(FailedPass, AScopeThatFailsOnALostDeviceTellsTheCauseAndHoldsNothing) {
  const std::vector<Net> nets = make_nets(2, 3, 8);
  run_ranks(2, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const Net& net = nets[static_cast<std::size_t>(collectives->rank())];
    Rank rank(net, collectives);
    const std::span<const int> scopes = rank.scopes->of(*net->list->ptr(1));
    const int params[] = {2, 3};  // of that block: reading it needs no device
    rank.model->gather(params);
    rank.model->begin_forward();
    const auto lost_within = [&] {
      const EnteredScopes entered(*rank.model, scopes);
      rank.device->lose(true);
      throw std::runtime_error("the cause");
    };
    EXPECT_THAT(lost_within, ThrowsMessage<std::runtime_error>(HasSubstr("the cause")));
    EXPECT_THROW(rank.model->scopes().enter(scopes.front()), DeviceError);
    rank.device->lose(false);
    rank.model->scopes().enter(scopes.front());
    rank.device->lose(true);
    EXPECT_THROW(rank.model->scopes().leave(scopes.front(), {}, {}), DeviceError);
    rank.device->lose(false);
    rank.model->release(params, true);
    rank.model->engine().gatherer().invalidate(engine::Changed::kAll);  // refuses held memory
    rank.model->destroy(false);
  });
}

}  // namespace
}  // namespace strata::torch
