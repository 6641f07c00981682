// The C++ face: descriptions of modules, and trainers. Ranks are threads of this process, each with
// its own model and trainer.
#include "strata/torch/trainer.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "strata/base/error.h"
#include "strata/torch/scoped_call.h"
#include "torch/live_engines.h"

namespace strata::torch {
namespace {

namespace nn = ::torch::nn;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::ThrowsMessage;

// So few live bytes that a unit goes as soon as nothing holds it.
constexpr const char* kStage3 = R"({"train_batch_size": 4, "zero_optimization": {"stage": 3},
  "strata": {"max_live_bytes": 1},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}})";

struct BlockImpl : nn::Module {
  BlockImpl()
      : up(register_module("up", nn::Linear(6, 5))),
        down(register_module("down", nn::Linear(5, 6))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (fails) throw std::runtime_error("the block failed");
    return x + down(at::tanh(up(x)));
  }
  nn::Linear up, down;
  bool fails = false;
};
TORCH_MODULE(Block);

// A model with blocks, a parameter of the root, and a weight that is read outside its own module.
struct ModelImpl : nn::Module {
  ModelImpl()
      : shift(register_parameter("shift", ::torch::zeros({6}))),
        head(register_module("head", nn::Linear(nn::LinearOptions(6, 6).bias(false)))) {
    for (int i = 0; i < 3; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    register_buffer("seen", ::torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = call(*head, x) + shift;
    for (const auto& block : *blocks) h = call(*block->as<Block>(), h);
    return at::linear(h, call.read(head->weight));
  }
  Block block(std::size_t index) { return Block(blocks->ptr<BlockImpl>(index)); }

  ScopedCall call;
  at::Tensor shift;
  nn::Linear head;
  nn::ModuleList blocks;
};
TORCH_MODULE(Model);

std::vector<Model> make_models(int count) {
  std::vector<Model> models;
  for (int i = 0; i < count; ++i) {
    ::torch::manual_seed(7);
    models.emplace_back();
  }
  return models;
}

at::Tensor part_of(const at::Tensor& all, int rank, int world) {
  return all.chunk(world)[static_cast<std::size_t>(rank)];
}

// The model's parameters after some steps on the same four samples, whatever the number of ranks.
std::vector<at::Tensor> train(int world, const TrainerOptions& options, int steps) {
  ::torch::manual_seed(3);
  const at::Tensor x = ::torch::randn({4, 6}), y = ::torch::randn({4, 6});
  std::vector<Model> models = make_models(world);
  run_ranks(world, [&](std::shared_ptr<comm::Collectives> collectives) {
    const int rank = collectives->rank();
    Model& model = models[static_cast<std::size_t>(rank)];
    TrainerOptions mine = options;
    mine.collectives = std::move(collectives);
    Trainer trainer(model.ptr(), std::move(mine));
    model->call = trainer.call();
    for (int i = 0; i < steps; ++i) {
      const at::Tensor out = trainer.forward(*model, part_of(x, rank, world));
      trainer.backward(at::mse_loss(out, part_of(y, rank, world)));
      EXPECT_TRUE(trainer.step().has_value());
    }
    trainer.close(/*keep_values=*/true);
  });
  std::vector<at::Tensor> values;
  for (const auto& p : models.back()->parameters()) values.push_back(p.detach());
  return values;
}

TEST(Trainer, TrainsShardedToWhatOneRankTrains) {
  const auto one = train(1, {.config = kStage3}, 5);
  for (const int world : {2, 4}) {
    const auto many = train(world, {.config = kStage3}, 5);
    ASSERT_EQ(one.size(), many.size());
    for (std::size_t i = 0; i < one.size(); ++i)
      EXPECT_TRUE(at::allclose(one[i], many[i], 1e-4, 1e-5)) << "parameter " << i;
  }
}

TEST(Trainer, ForwardRunsWithinTheAutocastOfTheConfiguration) {
  std::string config = kStage3;
  config.insert(1, R"("torch_autocast": {"enabled": true, "dtype": "bf16"}, )");
  std::vector<Model> models = make_models(2);
  run_ranks(2, [&](std::shared_ptr<comm::Collectives> collectives) {
    Model& model = models[static_cast<std::size_t>(collectives->rank())];
    Trainer trainer(model.ptr(), {.config = config, .collectives = collectives});
    model->call = trainer.call();
    const at::Tensor out = trainer.forward(*model, ::torch::ones({2, 6}));
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    trainer.backward(out.sum());
    EXPECT_TRUE(trainer.step().has_value());
    EXPECT_EQ(model->call.read(model->head->weight).scalar_type(), at::kFloat);
    model->block(0)->fails = true;
    EXPECT_THROW(trainer.forward(*model, ::torch::ones({2, 6})), std::runtime_error);
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  });
}

TEST(Trainer, HoldsParametersOnlyWhileACallUsesThem) {
  std::vector<Model> models = make_models(2);
  run_ranks(2, [&](std::shared_ptr<comm::Collectives> collectives) {
    Model& model = models[static_cast<std::size_t>(collectives->rank())];
    Trainer trainer(model.ptr(), {.config = kStage3, .collectives = collectives});
    model->call = trainer.call();
    EXPECT_EQ(model->block(0)->up->weight.numel(), 0);
    const at::Tensor loss = trainer.forward(*model, ::torch::ones({2, 6})).sum();
    EXPECT_EQ(model->block(0)->up->weight.numel(), 0);
    EXPECT_EQ(model->call.read(model->head->weight).numel(), 36);
    trainer.backward(loss);
    EXPECT_EQ(model->block(0)->up->weight.numel(), 0);
    trainer.step();
    EXPECT_EQ(model->head->weight.numel(), 0);
    EXPECT_GT(trainer.grad_norm().value_or(0.0), 0.0);
    EXPECT_EQ(trainer.global_steps(), 1);
  });
}

TEST(Trainer, ParamGroupsHaveTheirOwnHyperParametersWhichAreLive) {
  std::vector<Model> models = make_models(2);
  run_ranks(2, [&](std::shared_ptr<comm::Collectives> collectives) {
    Model& model = models[static_cast<std::size_t>(collectives->rank())];
    ParamGroup frozen_rate, others;
    for (const auto& entry : model->named_parameters())
      (entry.key() == "shift" ? frozen_rate : others).parameters.push_back(entry.value());
    frozen_rate.scalars.lr = 0.0;
    Trainer trainer(model.ptr(),
                    {.config = R"({"train_batch_size": 4, "zero_optimization": {"stage": 2}})",
                     .groups = {frozen_rate, others},
                     .collectives = collectives});
    model->call = trainer.call();
    const auto step = [&] {
      trainer.backward(trainer.forward(*model, ::torch::ones({2, 6})).sum());
      trainer.step();
    };
    step();
    EXPECT_TRUE(at::equal(model->shift, ::torch::zeros({6})));
    trainer.groups()[0].lr = 0.1;
    step();
    EXPECT_FALSE(at::equal(model->shift, ::torch::zeros({6})));
  });
}

TEST(Trainer, AStepGoesOnAfterAForwardThatThrew) {
  std::vector<Model> models = make_models(2);
  run_ranks(2, [&](std::shared_ptr<comm::Collectives> collectives) {
    Model& model = models[static_cast<std::size_t>(collectives->rank())];
    Trainer trainer(model.ptr(), {.config = kStage3, .collectives = collectives});
    model->call = trainer.call();
    model->block(1)->fails = true;
    EXPECT_THROW(trainer.forward(*model, ::torch::ones({2, 6})), std::runtime_error);
    EXPECT_EQ(model->block(1)->up->weight.numel(), 0) << "it was let go";
    model->block(1)->fails = false;
    trainer.backward(trainer.forward(*model, ::torch::ones({2, 6})).sum());
    EXPECT_TRUE(trainer.step()->applied);
  });
}

TEST(Trainer, LoadsWhatItSavedBuffersIncluded) {
  const std::string folder = ::testing::TempDir() + "/strata_trainer_test";
  std::vector<Model> saved = make_models(2), loaded = make_models(2);
  run_ranks(2, [&](std::shared_ptr<comm::Collectives> collectives) {
    const auto rank = static_cast<std::size_t>(collectives->rank());
    const ::torch::NoGradGuard no_grad;
    saved[rank]->shift.fill_(5.0);
    saved[rank]->named_buffers()["seen"].fill_(9.0);
    {
      Trainer trainer(saved[rank].ptr(), {.config = kStage3, .collectives = collectives});
      trainer.save(folder);
    }
    Trainer trainer(loaded[rank].ptr(), {.config = kStage3, .collectives = collectives});
    trainer.load(folder);
    trainer.close(/*keep_values=*/true);
    EXPECT_TRUE(at::equal(loaded[rank]->shift, ::torch::full({6}, 5.0)));
    EXPECT_EQ(loaded[rank]->named_buffers()["seen"].item<float>(), 9.0F);
  });
}

TEST(Trainer, GoesOnFromACheckpointOfAnotherNumberOfRanks) {
  const std::string folder = ::testing::TempDir() + "/strata_trainer_checkpoints";
  constexpr const char* kSettings = R"({"train_batch_size": 4, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "scheduler": {"type": "WarmupLR",
    "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.01}}})";
  const auto train = [](Trainer& trainer, Model& model, int rank, int world, int from, int to) {
    for (int step = from; step < to; ++step) {
      const at::Tensor all = ::torch::arange(24.0F).view({4, 6}) * 0.1F + step;
      const at::Tensor mine = part_of(all, rank, world);
      trainer.backward(trainer.forward(*model, mine).square().mean());
      trainer.step();
    }
  };
  // Six steps on two ranks, with a checkpoint after three, and the last three again on one.
  std::vector<Model> models = make_models(3);
  double rate = 0.0;
  run_ranks(2, [&](std::shared_ptr<comm::Collectives> collectives) {
    const int rank = collectives->rank();
    Model& model = models[static_cast<std::size_t>(rank)];
    Trainer trainer(model.ptr(), {.config = kSettings, .collectives = collectives});
    model->call = trainer.call();
    train(trainer, model, rank, 2, 0, 3);
    model->named_buffers()["seen"].fill_(4.0);
    trainer.save_checkpoint(folder);
    train(trainer, model, rank, 2, 3, 6);
    if (rank == 0) rate = trainer.groups()[0].lr;
    trainer.close(/*keep_values=*/true);
  });
  const std::shared_ptr<comm::Collectives> one = comm::LocalGroup(1).rank(0);
  Trainer trainer(models[2].ptr(), {.config = kSettings, .collectives = one});
  models[2]->call = trainer.call();
  EXPECT_EQ(trainer.load_checkpoint(::testing::TempDir() + "/strata_no_checkpoints"), std::nullopt);
  EXPECT_EQ(trainer.load_checkpoint(folder), folder + "/global_step3");
  EXPECT_EQ(trainer.global_steps(), 3);
  train(trainer, models[2], 0, 1, 3, 6);
  EXPECT_EQ(trainer.groups()[0].lr, rate);
  trainer.close(/*keep_values=*/true);
  EXPECT_EQ(models[2]->named_buffers()["seen"].item<float>(), 4.0F);
  EXPECT_TRUE(at::allclose(models[2]->shift, models[0]->shift, 1e-5, 1e-7));
  EXPECT_TRUE(
      at::allclose(models[2]->block(2)->up->weight, models[0]->block(2)->up->weight, 1e-5, 1e-7));
}

TEST(Trainer, RefusesWhatItCannotTrainAndSaysWhy) {
  Model model;
  const std::shared_ptr<comm::Collectives> one = comm::LocalGroup(1).rank(0);
  const auto make = [&](const std::vector<ParamGroup>& groups) {
    return Trainer(model.ptr(), {.config = kStage3, .groups = groups, .collectives = one});
  };
  EXPECT_THAT(
      [&] {
        make({{{model->shift}, {}}});
      },
      ThrowsMessage<UsageError>(HasSubstr("in no param group")));
  EXPECT_THAT(
      [&] {
        make({{{model->shift, model->shift}, {}}});
      },
      ThrowsMessage<UsageError>(HasSubstr("in groups 0 and 0")));
  EXPECT_THAT([&] { Trainer(nullptr, {.config = kStage3, .collectives = one}); },
              ThrowsMessage<UsageError>(HasSubstr("Pass model.ptr()")));

  Trainer trainer(model.ptr(), {.config = kStage3, .collectives = one});
  Block stranger;
  EXPECT_THAT(
      [&] {
        trainer.call()(*stranger, ::torch::ones({2, 6}));
      },
      ThrowsMessage<UsageError>(HasSubstr("a module of the trained model")));
  EXPECT_THAT(
      [&] {
        trainer.forward(*stranger, ::torch::ones({2, 6}));
      },
      ThrowsMessage<UsageError>(HasSubstr("the module that the trainer was made with")));
  EXPECT_THAT([&] { trainer.step(); },
              ThrowsMessage<UsageError>(HasSubstr("without a backward pass")));
  trainer.close();
  EXPECT_THAT([&] { trainer.step(); }, ThrowsMessage<UsageError>(HasSubstr("destroyed")));
}

struct PartImpl : nn::Module {
  PartImpl() : linear(register_module("linear", nn::Linear(2, 3))) {}
  nn::Linear linear;
};
TORCH_MODULE(Part);

struct WholeImpl : nn::Module {
  WholeImpl() : scale(register_parameter("scale", ::torch::ones({4}))) {
    list->push_back(Part());
    list->push_back(Part());
    register_module("list", list);
    register_module("alias", list[0]->as<PartImpl>()->linear);
  }
  at::Tensor scale;
  nn::ModuleList list;
};

TEST(ModuleDescription, NamesEveryParameterOnceInTheOrderOfRegistration) {
  const WholeImpl whole;
  std::vector<std::string> names;
  for (const auto& parameter : describe_module(whole).input.parameters)
    names.push_back(parameter.name);
  EXPECT_THAT(names, ElementsAre("scale", "list.0.linear.weight", "list.0.linear.bias",
                                 "list.1.linear.weight", "list.1.linear.bias"));
}

TEST(ModuleDescription, SpellsClassesAsAConfigurationDoes) {
  const WholeImpl whole;
  const ModuleDescription description = describe_module(whole);
  std::vector<std::string> classes;
  for (const auto& node : description.input.tree) classes.push_back(node.class_name);
  EXPECT_THAT(classes, ElementsAre("Whole", "ModuleList", "Part", "Linear", "Part", "Linear"));
  EXPECT_FALSE(description.input.tree[1].callable) << "a list is never called";
  EXPECT_TRUE(description.input.tree[2].callable);
  EXPECT_EQ(description.modules[0], &whole);
}

TEST(ModuleDescription, TellsEachParameterItsGroup) {
  const WholeImpl whole;
  const auto description = describe_module(whole, {{whole.scale.unsafeGetTensorImpl(), 1}});
  EXPECT_EQ(description.input.parameters[0].group, 1);
  EXPECT_EQ(description.input.parameters[1].group, 0);
}

TEST(TensorSearch, LooksIntoEveryContainerOfTensors) {
  const at::Tensor a = ::torch::ones({1}), b = ::torch::ones({2}), c = ::torch::ones({3});
  const auto value =
      std::make_tuple(a, std::vector<std::optional<at::Tensor>>{b, std::nullopt},
                      std::map<std::string, std::pair<int, at::Tensor>>{{"c", {1, c}}},
                      std::string("no tensor"), 7, 0.5);
  std::vector<at::Tensor> found;
  collect_tensors(value, found);
  ASSERT_EQ(found.size(), 3U);
  EXPECT_TRUE(found[0].is_same(a));
  EXPECT_TRUE(found[1].is_same(b));
  EXPECT_TRUE(found[2].is_same(c));
}

}  // namespace
}  // namespace strata::torch
