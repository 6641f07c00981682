// Engines of small models for tests of how values get into them: linear layers, ranks as threads of
// this process, everything on the CPU.
#pragma once

#include <ATen/Functions.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "strata/comm/host/host_collectives.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/scoped_call.h"
#include "strata/torch/sharded/sharded_model.h"
#include "strata/torch/start/host_transfer.h"

namespace strata::torch::testing {

// Runs on every rank; a failure of one is rethrown to the caller.
using RankBody = std::function<void(std::shared_ptr<comm::Collectives>)>;

// `group`: has a rank(int).
template <typename Group>
void run_ranks(Group& group, int world, const RankBody& rank) {
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back(
        [&, r, collectives = std::shared_ptr<comm::Collectives>(group.rank(r))]() mutable {
          try {
            rank(std::move(collectives));
          } catch (...) {
            failures[static_cast<std::size_t>(r)] = std::current_exception();
          }
        });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

inline void run_ranks(int world, const RankBody& rank) {
  comm::LocalGroup group(world);
  run_ranks(group, world, rank);
}

namespace nn = ::torch::nn;

inline const c10::Device kHere(c10::DeviceType::CPU);

// Blocks of a width at which weights are of several of kBlock, and of part of one.
struct NetImpl : nn::Module {
  explicit NetImpl(int blocks, int width) {
    register_module("blocks", list);
    for (int i = 0; i < blocks; ++i) list->push_back(nn::Linear(width, width));
  }
  nn::ModuleList list;
};
struct Net : nn::ModuleHolder<NetImpl> {
  using nn::ModuleHolder<NetImpl>::ModuleHolder;
};

inline Net make_net(int blocks, int width = 700) {
  ::torch::manual_seed(5);
  return Net(blocks, width);
}

inline engine::Config config_of(int stage, int world, const std::string& tier = "auto") {
  engine::Config config = engine::Config::parse(fmt::format(
      R"({{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}},
           "zero_optimization": {{"stage": {}, "stage3_param_persistence_threshold": 0}},
           "strata": {{"max_live_bytes": 1, "wrap": ["Linear"], "init": {{"tier": "{}"}}}}}})",
      stage, tier));
  config.complete_batch(world);
  return config;
}

inline std::vector<at::Tensor> values_of(const Net& net) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& p : net->parameters()) values.push_back(p.detach().clone());
  return values;
}

// Equal ones, made by one thread: they share torch's generator.
inline std::vector<Net> make_nets(int count, int blocks, int width = 700) {
  std::vector<Net> nets;
  for (int i = 0; i < count; ++i) nets.push_back(make_net(blocks, width));
  return nets;
}

// The values of the engine's parameters, in fp32.
inline std::vector<at::Tensor> values_in(ShardedModel& model) {
  std::vector<at::Tensor> values;
  for (int i = 0; i < model.parameters().size(); ++i) {
    const int params[] = {i};
    model.gather(params);
    values.push_back(model.parameters().full_view(i).to(at::kFloat));
    model.release(params, true);
  }
  return values;
}

// Runs `body` on every rank with a live engine and the parameters of another model. Their values
// are three times the engine's, and they have more blocks than the ring holds at once.
inline void on_live_engines(
    int world, int stage,
    const std::function<void(ShardedModel&, const std::vector<ModelParameter>&)>& body) {
  constexpr int kBlocks = 12;
  const std::vector<Net> nets = make_nets(world, kBlocks);
  const std::vector<Net> others = make_nets(world, kBlocks);
  run_ranks(world, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const auto rank = static_cast<std::size_t>(collectives->rank());
    const ModuleDescription description = describe_module(*nets[rank]);
    ShardedModel model(description.input, config_of(stage, world), engine::UpdateRule::kNone,
                       make_runtime(kHere, 2, collectives), "engine");
    const std::vector<ModelParameter> parameters = describe_module(*others[rank]).input.parameters;
    for (const ModelParameter& parameter : parameters) parameter.variable.detach().mul_(3.0);
    body(model, parameters);
    model.destroy(false);
  });
}

// The parameter's values, rounded as the engine keeps them.
inline at::Tensor rounded(const ModelParameter& parameter) {
  return parameter.variable.detach().to(at::kBFloat16).to(at::kFloat);
}

// The bytes of whole units that initialization gathered when it had all values.
inline Bytes gathered_at_the_end(const engine::InitReport& report) {
  Bytes bytes;
  for (const engine::InitPhase& phase : report.phases()) {
    if (phase.name == "all-gather") bytes = phase.bytes;
  }
  return bytes;
}

struct Given {
  std::vector<at::Tensor> values;  // by parameter, in fp32
  std::vector<std::vector<Comparison::Run>> runs;
  bool differs = false;
  bool complete = false;
};

inline constexpr checkpoint::RingOptions kSmallRing{4, 1_MiB};

// Gives a live engine new values through the ring, and compares them over the ranks.
inline Given bring_in(ShardedModel& model, const std::vector<ModelParameter>& parameters) {
  Given given;
  engine::Engine& engine = model.engine();
  ThreadPool threads(3);
  Comparison comparison(engine.collectives(), parameters);
  {
    engine::InitReport::Phase phase(engine.init_report(), "move in", Bytes());
    HostIntake intake(engine, threads, &comparison, phase, /*at_once=*/true, kSmallRing);
    for (const engine::Unit& unit : engine.weights().units()) {
      for (const int param : unit.spec.params)
        intake.add(param, Numel(), parameters[static_cast<std::size_t>(param)].variable.detach());
    }
    std::vector<int> whole;
    for (const engine::Unit& unit : engine.weights().units()) {
      if (unit.whole) whole.push_back(unit.id);
    }
    intake.flush([&] { engine.gather_early(whole); });
    given.complete = intake.complete();
  }
  comparison.exchange();
  given.differs = comparison.any();
  if (given.differs) engine.gatherer().abandon_lazy_gather();
  engine.weights_changed(given.complete);
  given.values = values_in(model);
  for (int i = 0; i < model.parameters().size(); ++i) given.runs.push_back(comparison.runs(i, 1));
  return given;
}

}  // namespace strata::torch::testing
