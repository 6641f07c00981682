// The engine's whole step against the plain one of reference_step.h: the ranks' actions, and the
// transport between them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/late_ranks.h"
#include "comm/split_ranks.h"
#include "engine/core/fake_model.h"
#include "engine/core/faulty_device.h"
#include "engine/core/reference_step.h"
#include "strata/comm/combined/combined_collectives.h"
#include "strata/comm/peer/peer_collectives.h"

namespace strata::engine::fake {

inline constexpr int kSteps = 3;

inline std::vector<GroupScalars> groups_of(int step) {
  std::vector<GroupScalars> groups(3);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    groups[g].lr = 1e-2 * static_cast<double>(g + 1) / (step + 1);
    groups[g].beta1 = 0.9 - 0.1 * static_cast<double>(g);
    groups[g].weight_decay = 0.1 * static_cast<double>(g);
  }
  return groups;
}

// The gradients of one rank's autograd in one micro-step; the same call gives the same gradients.
struct Script {
  // Gradients of (step, micro, rank) by parameter.
  std::function<Gradients(int step, int micro, int rank)> gradients;
  // The order in which a rank's gradients arrive; empty: scope by scope, backwards.
  std::function<std::vector<int>(int step, int micro, int rank)> arrival;
  // Whether a rank's passes run the scope; empty: all of them.
  std::function<bool(const plan::ScopeSpec& scope, int rank)> runs;
};

// The ranks' collectives. kLatePeers: peers on devices whose streams run late. kJoint: threads that
// gather together.
enum class Over { kThreads, kPeers, kPeersGather, kPeersReduce, kLatePeers, kJoint };

// `device`: the rank's own where it matters.
inline std::shared_ptr<comm::Collectives> joined(
    std::shared_ptr<comm::Collectives> threads, Over over,
    const std::shared_ptr<device::CpuDevice>& device = nullptr) {
  using comm::conformance::PeersCarry;
  using comm::conformance::split_rank;
  if (over == Over::kLatePeers) return comm::make_peer_collectives(device, std::move(threads), {});
  if (threads->world_size() == 1 || over == Over::kThreads) return threads;
  if (over == Over::kJoint)
    return comm::make_joint_gathers(std::move(threads), std::make_shared<device::CpuDevice>());
  if (over == Over::kPeers) {
    return comm::make_peer_collectives(std::make_shared<device::CpuDevice>(), std::move(threads),
                                       {});
  }
  return split_rank(std::move(threads),
                    over == Over::kPeersGather ? PeersCarry::kGathers : PeersCarry::kReductions);
}

struct Case {
  DType dtype = DType::kFloat32;
  int world = 1;
  int accumulation = 1;
  RankOptions options;
  double loss_scale = 1.0;
  Over over = Over::kThreads;
  bool ahead = false;  // on devices that run ahead, but whose streams are in order
  // Runs on each rank before its first pass.
  std::function<void(FakeRank& rank)> begins = nullptr;
  // Runs on each rank between its passes: after each one, and after each step.
  std::function<void(FakeRank& rank)> between = nullptr;
  std::string name() const {
    return fmt::format("{} stage {} world {} accumulation {} boundary {} clipping {}",
                       name_of(dtype), options.engine.stage, world, accumulation,
                       options.engine.reduce_at_boundary, options.engine.gradient_clipping);
  }
};

inline Gradients all_gradients(const FakeModel& model, int step, int micro, int rank) {
  Gradients gradients(model.params.size());
  for (int p = 0; p < model.count(); ++p) {
    const auto index = static_cast<std::size_t>(p);
    if (!model.params[index].trainable) continue;
    const auto seed = static_cast<std::uint64_t>(((step * 8 + micro) * 8 + rank) * 64 + p);
    gradients[index] = noises(seed, model.numel(p));
  }
  return gradients;
}

inline void add_all(FakeRank& rank, const Gradients& gradients, const std::vector<int>& arrival,
                    bool boundary) {
  const auto add = [&](int p) {
    const auto& gradient = gradients[static_cast<std::size_t>(p)];
    if (gradient) rank.add(p, *gradient);
  };
  if (arrival.empty()) {
    rank.backward(boundary, add);
  } else {
    rank.begin_backward(boundary);
    for (const int p : arrival) add(p);
    rank.engine().end_backward();
  }
}

inline void expect_same_weights(FakeRank& rank, const ReferenceStep& reference) {
  for (int p = 0; p < rank.model().count(); ++p) {
    ASSERT_EQ(rank.weight(p), reference.weight(p))
        << rank.model().params[static_cast<std::size_t>(p)].name;
  }
}

inline void expect_bits_of_reference(const FakeModel& model, const Case& c, const Script& script) {
  SCOPED_TRACE(c.name());
  ReferenceOptions plain;
  plain.reduce_dtype = c.options.engine.reduce_dtype;
  plain.sum = c.options.engine.sum_gradients;
  plain.clipping = c.options.engine.gradient_clipping;
  plain.decoupled = c.options.rule == UpdateRule::kAdamW;
  plain.decay_unused = c.options.engine.decay_unused;
  expect_no_errors(run_ranks(c.world, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    ReferenceStep reference(model, c.world, plain);
    RankOptions options = c.options;
    if (c.over == Over::kLatePeers) options.device = comm::conformance::late_device(r);
    if (c.ahead) options.device = std::make_shared<FaultyDevice>();
    if (script.runs)
      options.runs = [&script, r](const plan::ScopeSpec& scope) { return script.runs(scope, r); };
    FakeRank rank(model, options, joined(std::move(collectives), c.over, options.device));
    if (c.begins) c.begins(rank);
    rank.expect_weights(reference.weights());
    expect_same_weights(rank, reference);
    for (int step = 0; step < kSteps; ++step) {
      rank.groups = groups_of(step);
      for (int micro = 0; micro < c.accumulation; ++micro) {
        const bool boundary = micro + 1 == c.accumulation;
        rank.forward();
        std::vector<Gradients> by_rank;
        for (int i = 0; i < c.world; ++i) by_rank.push_back(script.gradients(step, micro, i));
        add_all(rank, by_rank[static_cast<std::size_t>(r)],
                script.arrival ? script.arrival(step, micro, r) : std::vector<int>{}, boundary);
        reference.add(by_rank, boundary || !c.options.engine.reduce_at_boundary);
        if (c.between) c.between(rank);
      }
      const double norm = reference.step(groups_of(step), c.loss_scale);
      const StepResult result = rank.engine().step(groups_of(step), c.loss_scale, false);
      ASSERT_TRUE(result.applied);
      ASSERT_EQ(result.grad_norm.value_or(norm), norm) << "step " << step;
      ASSERT_EQ(rank.engine().gradient_check().last_norm(), norm) << "step " << step;
      rank.expect_weights(reference.weights());
      expect_same_weights(rank, reference);
      if (c.between) c.between(rank);
    }
  }));
}

inline Script plain_script(const FakeModel& model) {
  return {
      [&model](int step, int micro, int rank) { return all_gradients(model, step, micro, rank); },
      nullptr, nullptr};
}

// Each rank runs only its own blocks of the model: with `world` ranks every world-th.
inline Script script_of_own_blocks(const FakeModel& model, int world) {
  const auto runs = [&model, world](const plan::ScopeSpec& scope, int rank) {
    return std::ranges::all_of(scope.units, [&](int unit) {
      const std::string& name = model.plan.units[static_cast<std::size_t>(unit)].name;
      const std::string_view of_blocks = "layers.";
      return !name.starts_with(of_blocks) ||
             std::stoi(name.substr(of_blocks.size())) % world == rank;
    });
  };
  const auto gradients = [&model, runs](int step, int micro, int rank) {
    Gradients result(model.params.size());
    const Gradients all = all_gradients(model, step, micro, rank);
    for (const plan::ScopeSpec& scope : model.plan.scopes) {
      if (!runs(scope, rank)) continue;
      for (const int unit : scope.units) {
        for (const int p : model.plan.units[static_cast<std::size_t>(unit)].params)
          result[static_cast<std::size_t>(p)] = all[static_cast<std::size_t>(p)];
      }
    }
    return result;
  };
  return {gradients, nullptr, runs};
}

}  // namespace strata::engine::fake
