// The engine's step where things are sharded inside groups of ranks, against the plain step of
// reference_step.h: the groups' members, the transport between groups, and the ranks' actions.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/collective_network.h"
#include "comm/grouped_ranks.h"
#include "comm/late_ranks.h"
#include "engine/core/fake_model.h"
#include "engine/core/reference_step.h"
#include "engine/core/training_step_cases.h"

namespace strata::engine::fake {

struct Groups {
  int world = 4;
  int size = 2;
  bool network = false;  // between them; else replicas read each other's memory
  comm::Slices slices = comm::Slices::kReplicated;
  bool late = false;  // peers, in groups and across, on devices whose streams run late
};

// `device`: the rank's own where they run late; else null.
using DeviceBody = std::function<void(int rank, std::shared_ptr<comm::Collectives>,
                                      std::shared_ptr<device::CpuDevice> device)>;

inline std::vector<std::string> run_groups_on_devices(const Groups& groups,
                                                      const DeviceBody& body) {
  comm::CommOptions options;
  options.timeout = std::chrono::seconds(60);
  comm::conformance::GroupedRanks ranks(groups.world, groups.size, options, groups.slices);
  if (groups.network) {
    ranks.set_network([](auto across, comm::RankNames names, const auto& /*device*/) {
      return std::make_unique<comm::conformance::CollectiveNetwork>(std::move(across), names);
    });
  }
  if (groups.late) comm::conformance::join_by_peers(ranks, options.timeout);
  std::vector<std::string> errors(static_cast<std::size_t>(groups.world));
  std::vector<std::thread> threads;
  for (int r = 0; r < groups.world; ++r) {
    threads.emplace_back([&, r] {
      try {
        if (!groups.late) {
          body(r, ranks.rank(r), nullptr);
        } else {
          const auto device = comm::conformance::late_device(r);
          body(r, ranks.rank(r, device), device);
        }
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline std::vector<std::string> run_groups(const Groups& groups, const Body& body) {
  return run_groups_on_devices(
      groups, [&](int r, auto ranks, const auto& /*device*/) { body(r, std::move(ranks)); });
}

inline std::vector<GroupScalars> scalars() {
  std::vector<GroupScalars> groups(3);
  for (std::size_t g = 0; g < groups.size(); ++g) groups[g].lr = 1e-2 * static_cast<double>(g + 1);
  return groups;
}

// Weights and masters of this rank's shards, as bytes.
inline std::string shards_of(FakeRank& rank) {
  rank.settle();
  std::string result;
  const auto add = [&](std::span<const std::byte> bytes) {
    result.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  Weights& weights = rank.engine().weights();
  for (const Unit& unit : weights.units()) {
    add(unit.shard);
    if (!unit.trainable() || weights.masters().blocks(unit.id).empty()) continue;
    weights.masters().for_each(unit.id, Numel(), unit.layout.shard(), offload::Access::kRead,
                               [&](const StateRange& range) {
                                 for (const auto& lease : range.leases) add(lease->bytes());
                               });
  }
  return result;
}

inline void expect_same_replicas(FakeRank& rank) {
  const comm::ShardPosition place = rank.collectives().shard_position();
  const std::string mine = shards_of(rank);
  const std::vector<std::string> all = rank.collectives().all_gather_text(mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (static_cast<int>(r) % place.count != place.index) continue;
    EXPECT_TRUE(all[r] == mine) << r;
  }
}

struct GroupCase {
  Groups groups;
  int accumulation = 1;
  EngineOptions engine;
  double loss_scale = 1.0;
  bool shuffled = false;  // gradients arrive in another order on every rank
  std::function<Gradients(int step, int micro, int rank)> gradients;
};

inline void backward(FakeRank& rank, const GroupCase& c, int pass, int r, const Gradients& mine,
                     bool boundary) {
  std::vector<int> order(mine.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::mt19937 random(static_cast<unsigned>(pass * 8 + r));
  if (c.shuffled) std::shuffle(order.begin(), order.end(), random);
  rank.engine().begin_backward(boundary);
  for (const int p : order) {
    const auto& gradient = mine[static_cast<std::size_t>(p)];
    if (gradient) rank.add(p, *gradient);
  }
  rank.engine().end_backward();
}

inline void expect_bits_of_reference(const FakeModel& model, const GroupCase& c) {
  SCOPED_TRACE(fmt::format("world {} groups of {} network {} late {} stage {} accumulation {}",
                           c.groups.world, c.groups.size, c.groups.network, c.groups.late,
                           c.engine.stage, c.accumulation));
  ReferenceOptions plain;
  plain.reduce_dtype = c.engine.reduce_dtype;
  plain.sum = c.engine.sum_gradients;
  plain.clipping = c.engine.gradient_clipping;
  plain.group_size = c.groups.size;
  const bool secondary = c.groups.slices == comm::Slices::kSecondary;
  plain.groups_at_once = secondary;
  expect_no_errors(run_groups_on_devices(c.groups, [&](int r, auto ranks, auto device) {
    ReferenceStep reference(model, c.groups.world, plain);
    RankOptions options;
    options.engine = c.engine;
    options.device = std::move(device);
    FakeRank rank(model, options, std::move(ranks));
    rank.expect_weights(reference.weights());
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < c.accumulation; ++micro) {
        const bool boundary = micro + 1 == c.accumulation;
        std::vector<Gradients> by_rank;
        for (int i = 0; i < c.groups.world; ++i) {
          by_rank.push_back(c.gradients ? c.gradients(step, micro, i)
                                        : all_gradients(model, step, micro, i));
        }
        rank.forward();
        backward(rank, c, step * c.accumulation + micro, r, by_rank[static_cast<std::size_t>(r)],
                 boundary);
        reference.add(by_rank, boundary || !c.engine.reduce_at_boundary);
      }
      const double norm = reference.step(scalars(), c.loss_scale);
      const StepResult result = rank.engine().step(scalars(), c.loss_scale, false);
      // Secondary slices are smaller: the sum of squares is taken in another order.
      ASSERT_NEAR(result.grad_norm.value(), norm, secondary ? 1e-13 * norm : 0.0)
          << "step " << step;
      rank.expect_weights(reference.weights());
      for (int p = 0; p < model.count(); ++p) {
        ASSERT_EQ(rank.weight(p), reference.weight(p))
            << model.params[static_cast<std::size_t>(p)].name;
      }
      rank.collectives().barrier();
      if (!secondary) expect_same_replicas(rank);
    }
  }));
}

}  // namespace strata::engine::fake
