// Passes and steps of a FakeRank whose values do not matter, for tests of when units have memory.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/core/fake_model.h"
#include "strata/memory/host_buffer.h"

namespace strata::engine::fake {

// Eight blocks of equal size and a larger unit in front; with page-sized steps, so that bytes can
// be counted.
inline FakeModel model_of_blocks(std::int64_t block_numel, std::int64_t first_numel,
                                 bool frozen_blocks = false) {
  plan::ModelBuilder b;
  b.linear(0, "embed", first_numel);
  const int layers = b.list(0, "layers");
  for (int i = 0; i < 8; ++i) {
    const int layer = b.module(layers, std::to_string(i), "Layer");
    b.param(b.module(layer, "proj", "Linear"), "weight", block_numel, DType::kFloat32,
            !frozen_blocks);
  }
  return FakeModel(b);
}

// Eight modules that are no blocks, so that only a bound keeps them from sharing a unit.
inline FakeModel model_of_neighbours(std::int64_t numel, Numel shared) {
  plan::ModelBuilder b;
  for (int i = 0; i < 8; ++i) b.linear(0, "linear" + std::to_string(i), numel);
  plan::PlanOptions options;
  options.shared_numel = shared;
  return FakeModel(b, options);
}

// The options that the parser makes of a configuration whose bounds are zero.
inline RankOptions bounds_of_zero() {
  RankOptions options;
  options.engine.max_live = 0_B;
  options.engine.max_live_is_hard = false;
  options.engine.max_reuse = Numel();
  options.engine.prefetch = 0_B;
  return options;
}

inline std::vector<int> gathered_units(FakeRank& rank) {
  std::vector<int> units;
  for (const Unit& unit : rank.engine().weights().units()) {
    if (rank.gatherer().gathered(unit.id)) units.push_back(unit.id);
  }
  return units;
}

inline constexpr std::int64_t kBlock = 4096;  // elements: four pages

inline Bytes block_bytes() {
  return align_up(Bytes(kBlock * 4), memory::page_size());
}

inline void train_one_pass(FakeRank& rank) {
  rank.forward();
  rank.backward(true, [&](int p) { rank.add(p, noises(1, rank.model().numel(p))); });
}

inline void step(FakeRank& rank) {
  const std::vector<GroupScalars> groups(1);
  rank.engine().step(groups, 1.0, false);
}

inline void load_initial_weights(FakeRank& rank) {
  const FakeModel& model = rank.model();
  for (int p = 0; p < model.count(); ++p) {
    const Values values = model.initial(p);
    rank.engine().weights().store(p, Numel(), model.numel(p),
                                  reinterpret_cast<const std::byte*>(values.data()),
                                  DType::kFloat32);
  }
  rank.engine().weights_changed();
}

inline void on_two_ranks(const std::function<void(std::shared_ptr<comm::Collectives>)>& body) {
  expect_no_errors(run_ranks(2, [&](int, auto collectives) { body(std::move(collectives)); }));
}

}  // namespace strata::engine::fake
