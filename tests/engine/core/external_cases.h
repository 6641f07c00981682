// Steps in which an optimizer of the user's updates, in the host's own instructions, as one does
// whose states rest on the host: the bits of the plain loop.
#pragma once

#include <map>
#include <memory>

#include "engine/core/offloaded_cases.h"
#include "kernels/references.h"
#include "strata/engine/optimize/external_optimizer.h"

namespace strata::engine::fake {

// Adam with L2, of each segment by its parameter.
class HostAdam {
 public:
  void update(ExternalOptimizer& optimizer, std::span<const std::span<float>> gradients) {
    const std::vector<GroupScalars> groups = groups_of(static_cast<int>(optimizer.steps()) - 1);
    ASSERT_EQ(gradients.size(), optimizer.segments().size());
    for (std::size_t s = 0; s < gradients.size(); ++s) {
      const ExternalSegment& segment = optimizer.segments()[s];
      if (gradients[s].empty()) continue;
      ASSERT_EQ(gradients[s].size(), segment.weight.size());
      State& state = states_[segment.param];
      state.exp_avg.resize(segment.weight.size());
      state.exp_avg_sq.resize(segment.weight.size());
      const GroupScalars& group = groups[static_cast<std::size_t>(segment.group)];
      kernels::UpdateSpans spans;
      spans.weight = segment.weight;
      spans.exp_avg = state.exp_avg;
      spans.exp_avg_sq = state.exp_avg_sq;
      spans.gradient = gradients[s];
      kernels::UpdateScalars scalars;
      scalars.lr = group.lr;
      scalars.beta1 = group.beta1;
      scalars.beta2 = group.beta2;
      scalars.eps = group.eps;
      scalars.weight_decay = group.weight_decay;
      scalars.decoupled = false;
      scalars.step = ++state.steps;
      kernels::update_reference(spans, scalars);
    }
  }

 private:
  struct State {
    Values exp_avg;
    Values exp_avg_sq;
    std::int64_t steps = 0;
  };
  std::map<int, State> states_;
};

// Has ranks that are made with UpdateRule::kExternal update so.
inline void update_on_the_host(FakeRank& rank) {
  auto& optimizer = dynamic_cast<ExternalOptimizer&>(*rank.engine().optimizer());
  optimizer.set_update([&optimizer, adam = std::make_shared<HostAdam>()](auto gradients) {
    adam->update(optimizer, gradients);
  });
}

inline Case external_case(DType dtype, int world, int stage, Over over, const std::string& folder) {
  Case c{dtype, world, world == 2 ? 3 : 1, {}, dtype == DType::kFloat16 ? 1024.0 : 1.0, over};
  c.options.rule = UpdateRule::kExternal;
  c.options.engine.stage = stage;
  c.options.engine.gradient_clipping = world == 3 ? 0.0 : 0.25;
  c.options.prepares_first = world > 1;
  place_states(c.options.engine, memory::Tier::kHost, folder);
  c.begins = update_on_the_host;
  return c;
}

// Sweeps world sizes and dtypes at one stage, with accumulation, clipping and a loss scale.
inline void expect_bits_where_a_users_optimizer_is_offloaded(int stage, Over over) {
  const testing::TemporaryFolder folder;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const FakeModel model(uneven_builder(dtype));
    for (int world = 1; world <= 3; ++world)
      expect_bits_of_reference(model, external_case(dtype, world, stage, over, folder.path()),
                               plain_script(model));
  }
  // Units of several dtypes, of which fp64 weights are more than their masters.
  const FakeModel mixed(mixed_builder());
  expect_bits_of_reference(mixed, external_case(DType::kFloat32, 2, stage, over, folder.path()),
                           plain_script(mixed));
}

}  // namespace strata::engine::fake
