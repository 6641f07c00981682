// Passes and steps of a FakeRank where it does not matter what is trained. For tests of when units
// have memory.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/core/fake_model.h"

namespace strata::engine::fake {

inline void train_one_pass(FakeRank& rank) {
  rank.forward();
  rank.backward(true, [&](int p) { rank.add(p, noises(1, rank.model().numel(p))); });
}

inline void step(FakeRank& rank) {
  const std::vector<GroupScalars> groups(1);
  rank.engine().step(groups, 1.0, false);
}

inline void on_two_ranks(const std::function<void(std::shared_ptr<comm::Collectives>)>& body) {
  expect_no_errors(run_ranks(2, [&](int, auto collectives) { body(std::move(collectives)); }));
}

}  // namespace strata::engine::fake
