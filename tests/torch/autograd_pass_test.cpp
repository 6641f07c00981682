// Backward passes that autograd runs without a call of the engine: their begin and end, and that
// they train as passes by the engine's own call; and passes in the middle of which a device fails.
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>

#include "device/losable_device.h"
#include "strata/base/error.h"
#include "strata/torch/scoped_call.h"
#include "torch/live_engines.h"

namespace strata::torch {
namespace {

using testing::config_of;
using ::testing::HasSubstr;
using testing::kHere;
using testing::make_nets;
using testing::Net;
using testing::run_ranks;
using ::testing::ThrowsMessage;

constexpr int kPassRanks = 2;
constexpr int kPassWidth = 8;

engine::Config config_of_passes(int stage, int accumulation, const std::string& dtype) {
  engine::Config config = engine::Config::parse(fmt::format(
      R"({{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": {},
           "{}": {{"enabled": true}},
           "zero_optimization": {{"stage": {}, "stage3_param_persistence_threshold": 0}},
           "strata": {{"max_live_bytes": 1, "wrap": ["Linear"]}}}})",
      accumulation, dtype, stage));
  config.complete_batch(kPassRanks);
  return config;
}

// A block that is run again in backward, in a graph of its own, as reentrant checkpoints do.
struct Again : ::torch::autograd::Function<Again> {
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::function<at::Tensor(const at::Tensor&)>& run) {
    context->saved_data["x"] = x.detach();
    runs().push_back(run);
    const at::NoGradGuard no_grad;
    return run(x);
  }
  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   ::torch::autograd::variable_list gradients) {
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->saved_data["x"].toTensor().detach().requires_grad_(true);
    const auto run = runs().back();
    runs().pop_back();
    ::torch::autograd::backward({run(x)}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
  // The functions of this rank's blocks. They are here because a graph cannot save a function.
  static std::vector<std::function<at::Tensor(const at::Tensor&)>>& runs() {
    static thread_local std::vector<std::function<at::Tensor(const at::Tensor&)>> runs;
    return runs;
  }
};

// One rank's model and a loss of it.
struct Trained {
  Trained(const Net& given, const std::shared_ptr<comm::Collectives>& collectives, int stage,
          int accumulation = 1, const std::string& dtype = "bf16",
          const std::string& name = "engine")
      : net(given), description(describe_module(*given)) {
    const engine::Config config = config_of_passes(stage, accumulation, dtype);
    model = std::make_shared<ShardedModel>(description.input, config, engine::UpdateRule::kAdamW,
                                           make_runtime(kHere, 1, collectives), name);
    scopes = std::make_shared<ModuleScopes>(model, description);
    place = collectives->rank() + 1;
  }

  at::Tensor forward(bool again = false) {
    const ScopedCall call(scopes);
    const auto dtype = model->parameters().variable(0).scalar_type();
    at::Tensor x = at::full({2, kPassWidth}, 0.25 * place, at::TensorOptions().dtype(dtype));
    RootCall root(*model);
    for (const auto& child : *net->list) {
      auto* block = child->as<::torch::nn::Linear>();
      if (again && x.requires_grad())
        x = Again::apply(x, [call, block](const at::Tensor& y) { return call(*block, y); });
      else
        x = call(*block, x);
    }
    root.leave(x);
    return x;
  }
  at::Tensor loss(bool again = false) { return forward(again).to(at::kFloat).square().mean(); }

  void told(const at::Tensor& loss) {
    model->begin_backward();
    const double factor = model->control().loss_factor(true);
    (loss * factor).backward();
    model->end_backward();
  }
  std::optional<engine::StepResult> step() {
    const std::vector<engine::GroupScalars> groups(1);
    return model->step(groups);
  }
  std::int64_t reductions() { return model->engine().recorder().counts().reductions; }
  std::vector<at::Tensor> end() {
    std::vector<at::Tensor> values = testing::values_in(*model);
    model->destroy(false);
    return values;
  }

  Net net;
  ModuleDescription description;
  std::shared_ptr<ShardedModel> model;
  std::shared_ptr<ModuleScopes> scopes;
  int place;
};

void expect_same_values(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(at::equal(left[i], right[i])) << i;
}

// The same training on two models of their own: told and found. `body` gets a rank and how it
// differentiates.
using Differentiate = std::function<void(const at::Tensor&)>;
void expect_found_as_told(int stage, int accumulation,
                          const std::function<void(Trained&, const Differentiate&)>& body) {
  const std::vector<Net> nets = make_nets(2 * kPassRanks, 3, kPassWidth);
  run_ranks(kPassRanks, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const auto rank = static_cast<std::size_t>(collectives->rank());
    Trained told(nets[rank], collectives, stage, accumulation);
    body(told, [&](const at::Tensor& loss) { told.told(loss); });
    const std::int64_t reductions = told.reductions();
    const std::vector<at::Tensor> expected = told.end();
    Trained found(nets[kPassRanks + rank], collectives, stage, accumulation);
    body(found, [&](const at::Tensor& loss) { found.model->scale(loss).backward(); });
    EXPECT_EQ(found.reductions(), reductions) << "as many passes";
    expect_same_values(found.end(), expected);
  });
}

class AutogradPassAtStage : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, AutogradPassAtStage, ::testing::Values(0, 1, 2, 3));

TEST_P(AutogradPassAtStage, TrainsAsOneThatIsTold) {
  expect_found_as_told(GetParam(), 2, [](Trained& rank, const Differentiate& differentiate) {
    for (int micro_step = 0; micro_step < 4; ++micro_step) {
      differentiate(rank.loss());
      EXPECT_FALSE(rank.model->engine().in_backward());
      EXPECT_EQ(rank.step().has_value(), micro_step % 2 == 1);
    }
  });
}

TEST_P(AutogradPassAtStage, IsOneHoweverManyGraphsRunInside) {
  expect_found_as_told(GetParam(), 1, [](Trained& rank, const Differentiate& differentiate) {
    for (int step = 0; step < 3; ++step) {
      differentiate(rank.loss(/*again=*/true));
      rank.step();
    }
  });
}

TEST_P(AutogradPassAtStage, MayComeSeveralTimesBeforeAStep) {
  expect_found_as_told(GetParam(), 1, [](Trained& rank, const Differentiate& differentiate) {
    for (int step = 0; step < 2; ++step) {
      const at::Tensor first = rank.loss();
      const at::Tensor second = rank.loss();
      differentiate(first);
      differentiate(second * 3.0);
      EXPECT_TRUE(rank.step()->applied);
    }
  });
}

void on_trained_ranks(int stage, const std::string& dtype,
                      const std::function<void(Trained&)>& body) {
  const std::vector<Net> nets = make_nets(kPassRanks, 3, kPassWidth);
  run_ranks(kPassRanks, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    Trained rank(nets[static_cast<std::size_t>(collectives->rank())], collectives, stage, 1, dtype);
    body(rank);
    rank.model->destroy(false);
  });
}

TEST(AutogradPass, OfATensorStartsFromItsGradient) {
  on_trained_ranks(3, "bf16", [](Trained& rank) {
    const at::Tensor outputs = rank.forward();
    outputs.backward(at::ones_like(outputs));
    EXPECT_TRUE(rank.step()->applied);
  });
}

TEST(AutogradPass, ThatAnErrorEndedIsAbandonedByWhatComesNext) {
  on_trained_ranks(3, "bf16", [](Trained& rank) {
    for (const bool steps : {false, true}) {
      const at::Tensor outputs = rank.forward();
      const auto failed = std::make_shared<bool>(false);
      rank.net->parameters()[0].register_hook([failed](const at::Tensor& gradient) {
        if (!std::exchange(*failed, true)) throw std::runtime_error("the cause");
        return gradient;
      });
      EXPECT_THAT([&] { outputs.sum().backward(); },
                  ThrowsMessage<std::runtime_error>(HasSubstr("the cause")));
      if (steps) {
        EXPECT_THAT([&] { rank.step(); },
                    ThrowsMessage<UsageError>(HasSubstr("without a backward pass")));
      }
      rank.loss().backward();
      EXPECT_TRUE(rank.step()->applied);
    }
  });
}

TEST(AutogradPass, IsNotBegunByGradientsThatAreReturned) {
  on_trained_ranks(3, "bf16", [](Trained& rank) {
    const at::Tensor outputs = rank.forward();
    const auto grads = ::torch::autograd::grad({outputs.sum()}, {outputs}, {}, true);
    EXPECT_EQ(grads.size(), 1U);
    const at::Tensor weight = rank.net->parameters()[0];
    EXPECT_TRUE(::torch::autograd::grad({outputs.sum()}, {weight}, {}, true)[0].defined());
    EXPECT_THAT([&] { rank.step(); },
                ThrowsMessage<UsageError>(HasSubstr("without a backward pass")));
    outputs.sum().backward();
    EXPECT_TRUE(rank.step()->applied);
  });
}

TEST(AutogradPass, InFp16NeedsAScaledLoss) {
  on_trained_ranks(3, "fp16", [](Trained& rank) {
    EXPECT_THAT([&] { rank.loss().backward(); },
                ThrowsMessage<std::runtime_error>(HasSubstr("engine.scale(loss).backward()")));
    EXPECT_THAT([&] { rank.model->scale(at::ones({})); },
                ThrowsMessage<UsageError>(HasSubstr("requires no gradient")));
    rank.model->scale(rank.loss() * 1e-9).backward();
    EXPECT_TRUE(rank.step()->applied);
  });
}

TEST(AutogradPass, InsideAForwardKeepsItsGradientsForThePassThatFollows) {
  on_trained_ranks(2, "bf16", [](Trained& rank) {
    const ScopedCall call(rank.scopes);
    auto* block = rank.net->list->ptr(2)->as<::torch::nn::Linear>();
    {
      RootCall root(*rank.model);
      call(*block, at::ones({2, kPassWidth}, at::kBFloat16)).sum().backward();
      EXPECT_EQ(rank.reductions(), 0);
      EXPECT_FALSE(rank.model->engine().in_backward());
    }
    rank.told(rank.loss());
    EXPECT_EQ(rank.reductions(), 3);
    EXPECT_TRUE(rank.step()->applied);
  });
}

TEST(AutogradPass, OfOneLossOverTwoModelsIsAPassOfEach) {
  const std::vector<Net> nets = make_nets(2 * kPassRanks, 3, kPassWidth);
  run_ranks(kPassRanks, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const auto index = static_cast<std::size_t>(collectives->rank());
    Trained first(nets[index], collectives, 3, 2);
    Trained second(nets[kPassRanks + index], collectives, 2, 2, "bf16", "another engine");
    for (int micro_step = 0; micro_step < 4; ++micro_step) {
      const at::Tensor loss = first.loss() + second.loss();
      if (micro_step % 2 == 0)
        loss.backward();
      else
        first.told(loss);  // divided once, for both
      first.step();
      second.step();
    }
    const std::vector<at::Tensor> values = first.end();
    expect_same_values(second.end(), values);
  });
}

TEST(AutogradPass, TrainsAParameterThatWasFrozen) {
  const std::vector<Net> nets = make_nets(kPassRanks, 3, kPassWidth);
  for (const Net& net : nets) net->parameters()[2].set_requires_grad(false);
  run_ranks(kPassRanks, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const Net& net = nets[static_cast<std::size_t>(collectives->rank())];
    const at::Tensor before = net->parameters()[2].detach().clone();
    Trained rank(net, collectives, 3);
    for (const bool frozen : {true, false, true}) {
      net->parameters()[2].set_requires_grad(!frozen);
      rank.loss().backward();
      EXPECT_TRUE(rank.step()->applied);
    }
    EXPECT_FALSE(at::equal(rank.end()[2], before));
  });
}

// A device fails in the middle of a pass: the first error reaches the caller, the process goes on,
// and the engine says afterwards why it cannot go on.

using device::LosableDevice;

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
    const std::span<const int> scopes = rank.scopes->below(*net->list->ptr(1));
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
