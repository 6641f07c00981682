// Scripts use a step's gradients between backward and step: they drop them, all or one parameter's,
// put others in their place, and look at them. The reference is the plain loop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "engine/core/training_step_cases.h"

namespace strata::engine::fake {
namespace {

using ::testing::HasSubstr;

// The way in which passes of a step reduce, the ranks, and the tier of the reduced gradients.
struct Way {
  bool reduces = true;
  bool at_boundary = false;
  Over over = Over::kThreads;
  bool late_norm = false;
  memory::Tier tier = memory::Tier::kDevice;
  DType kept_in = DType::kFloat32;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all{{},
                                    {.reduces = false},
                                    {.at_boundary = true},
                                    {.over = Over::kPeers, .late_norm = true},
                                    {.reduces = false, .over = Over::kPeers, .late_norm = true},
                                    {.tier = memory::Tier::kHost},
                                    {.kept_in = DType::kBFloat16}};
  return all;
}

RankOptions options_of(const Way& way) {
  RankOptions options;
  options.engine.reduce_at_boundary = way.at_boundary;
  options.engine.late_norm = way.late_norm;
  options.engine.gradient_tier = way.tier;
  options.engine.accumulation_dtype = way.kept_in;
  return options;
}

void run_ways(const std::function<void(FakeRank& rank, int r, const Way& way)>& body,
              const FakeModel& model, int world = 2) {
  for (const Way& way : ways()) {
    SCOPED_TRACE(fmt::format("reduces {} boundary {} late {} kept in {}", way.reduces,
                             way.at_boundary, way.late_norm, name_of(way.kept_in)));
    expect_no_errors(run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> threads) {
      FakeRank rank(model, options_of(way), joined(std::move(threads), way.over));
      body(rank, r, way);
    }));
  }
}

void pass(FakeRank& rank, const Gradients& gradients, const Way& way, bool boundary) {
  rank.forward();
  rank.backward(
      boundary,
      [&](int p) {
        if (gradients[static_cast<std::size_t>(p)])
          rank.add(p, *gradients[static_cast<std::size_t>(p)]);
      },
      boundary || way.reduces);
}

Gradients not_finite(const FakeModel& model) {
  Gradients gradients = all_gradients(model, 7, 0, 0);
  for (auto& values : gradients) {
    if (values && !values->empty()) values->back() = std::numeric_limits<float>::quiet_NaN();
  }
  return gradients;
}

std::vector<std::vector<std::byte>> weights_of(FakeRank& rank) {
  std::vector<std::vector<std::byte>> weights;
  for (int p = 0; p < rank.model().count(); ++p) weights.push_back(rank.weight(p));
  return weights;
}

// The weights after a step with these gradients of ranks, as an engine gets them that drops
// nothing.
std::vector<std::vector<std::byte>> after_plain_step(const FakeModel& model, const Way& way,
                                                     const std::vector<Gradients>& by_rank) {
  std::vector<std::vector<std::byte>> weights;
  expect_no_errors(run_ranks(
      static_cast<int>(by_rank.size()), [&](int r, std::shared_ptr<comm::Collectives> threads) {
        FakeRank rank(model, options_of(way), joined(std::move(threads), way.over));
        pass(rank, by_rank[static_cast<std::size_t>(r)], way, true);
        rank.engine().step(groups_of(0), 1.0, false);
        auto mine = weights_of(rank);
        if (r == 0) weights = std::move(mine);
      }));
  return weights;
}

GradientEdits& edits_of(FakeRank& rank) {
  return rank.engine().reducer().edits();
}

void drop(FakeRank& rank, int param, bool came = false) {
  const Weights& weights = rank.engine().weights();
  edits_of(rank).drop(weights.unit_of(param).id, weights.slot_index_of(param), came);
}

TEST(GradientEdits, ABatchThatIsDroppedLeavesNothingBehind) {
  const FakeModel model(small_builder(DType::kBFloat16));
  std::map<const Way*, std::vector<std::vector<std::byte>>> expected;
  for (const Way& way : ways()) {
    expected[&way] = after_plain_step(
        model, way, {all_gradients(model, 0, 0, 0), all_gradients(model, 0, 0, 1)});
  }
  run_ways(
      [&](FakeRank& rank, int r, const Way& way) {
        for (const bool boundary : {false, true}) pass(rank, not_finite(model), way, boundary);
        rank.engine().zero_gradients();
        pass(rank, all_gradients(model, 0, 0, r), way, true);
        EXPECT_TRUE(rank.engine().step(groups_of(0), 1.0, false).applied);
        EXPECT_EQ(rank.engine().gradient_check().skipped_steps(true), 0);
        EXPECT_EQ(weights_of(rank), expected[&way]);
      },
      model);
}

TEST(GradientEdits, AStepOfNothingChangesNothingAndTheNextOneIsTheFirst) {
  const FakeModel model(small_builder(DType::kFloat32));
  const std::vector<Gradients> by_rank{all_gradients(model, 0, 0, 0),
                                       all_gradients(model, 0, 0, 1)};
  run_ways(
      [&](FakeRank& rank, int r, const Way& way) {
        const auto before = weights_of(rank);
        pass(rank, not_finite(model), way, true);
        rank.engine().zero_gradients();
        EXPECT_TRUE(rank.engine().step(groups_of(0), 1.0, false).applied);
        EXPECT_EQ(rank.engine().gradient_check().last_norm(), 0.0);
        EXPECT_EQ(weights_of(rank), before);
        pass(rank, by_rank[static_cast<std::size_t>(r)], way, true);
        rank.engine().step(groups_of(0), 1.0, false);
        if (way.kept_in != DType::kFloat32) return;
        ReferenceStep reference(model, 2, {});
        reference.add(by_rank, true);
        reference.step(groups_of(0), 1.0);
        expect_same_weights(rank, reference);
      },
      model);
}

TEST(GradientEdits, AParameterThatIsDroppedIsOneWithoutAGradient) {
  const FakeModel model(small_builder(DType::kFloat32));
  const auto gone = [&](int p) {
    return model.params[static_cast<std::size_t>(p)].trainable && p % 2 == 0;
  };
  run_ways(
      [&](FakeRank& rank, int r, const Way& way) {
        pass(rank, not_finite(model), way, false);
        for (int p = 0; p < model.count(); ++p) {
          if (model.params[static_cast<std::size_t>(p)].trainable) drop(rank, p);
        }
        pass(rank, all_gradients(model, 0, 0, r), way, true);
        for (int p = 0; p < model.count(); ++p) {
          if (gone(p)) drop(rank, p);
        }
        EXPECT_TRUE(rank.engine().step(groups_of(0), 1.0, false).applied);
        if (way.kept_in != DType::kFloat32) return;
        ReferenceStep reference(model, 2, {});
        std::vector<Gradients> by_rank{all_gradients(model, 0, 0, 0),
                                       all_gradients(model, 0, 0, 1)};
        for (Gradients& gradients : by_rank) {
          for (int p = 0; p < model.count(); ++p) {
            if (gone(p)) gradients[static_cast<std::size_t>(p)].reset();
          }
        }
        reference.add(by_rank, true);
        reference.step(groups_of(0), 1.0);
        expect_same_weights(rank, reference);
      },
      model);
}

TEST(GradientEdits, ARankMayDropAloneWhatIsNotReducedYet) {
  const FakeModel model(small_builder(DType::kFloat32));
  for (const bool late_norm : {false, true}) {
    const Way way{.reduces = false,
                  .over = late_norm ? Over::kPeers : Over::kThreads,
                  .late_norm = late_norm};
    expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> threads) {
      FakeRank rank(model, options_of(way), joined(std::move(threads), way.over));
      ReferenceStep reference(model, 2, {});
      pass(rank, all_gradients(model, 0, 0, r), way, false);
      if (r == 0) rank.engine().zero_gradients();
      reference.add({Gradients(model.params.size()), all_gradients(model, 0, 0, 1)}, false);
      pass(rank, all_gradients(model, 0, 1, r), way, true);
      reference.add({all_gradients(model, 0, 1, 0), all_gradients(model, 0, 1, 1)}, true);
      reference.step(groups_of(0), 1.0);
      rank.engine().step(groups_of(0), 1.0, false);
      expect_same_weights(rank, reference);
    }));
  }
}

TEST(GradientEdits, RanksThatDropDifferentReducedGradientsAreAllTold) {
  const FakeModel model(small_builder(DType::kFloat32));
  for (const bool all : {true, false}) {
    for (const Way& way : ways()) {
      if (!way.reduces || way.at_boundary) continue;
      std::vector<std::vector<std::byte>> weights[3];
      const auto errors = run_ranks(3, [&](int r, std::shared_ptr<comm::Collectives> threads) {
        FakeRank rank(model, options_of(way), joined(std::move(threads), way.over));
        const auto before = weights_of(rank);
        pass(rank, all_gradients(model, 0, 0, r), way, true);
        if (r == 1 && all) rank.engine().zero_gradients();
        if (r == 1 && !all) drop(rank, 0);
        try {
          rank.engine().step(groups_of(0), 1.0, false);
          ADD_FAILURE() << "nothing was thrown on rank " << r;
        } catch (const UsageError& error) {
          EXPECT_THAT(error.what(), HasSubstr("Rank 1 differs from rank 0"));
        }
        EXPECT_EQ(weights_of(rank), before);
        pass(rank, all_gradients(model, 0, 0, r), way, true);
        EXPECT_TRUE(rank.engine().step(groups_of(0), 1.0, false).applied);
      });
      expect_no_errors(errors);
    }
  }
}

// This rank's part of a parameter.
Values part_of(const FakeRank& /*rank*/, const Values& values, std::pair<Numel, Numel> range) {
  return {values.begin() + range.first.value, values.begin() + range.second.value};
}

TEST(GradientEdits, WhatIsStoredInTheirPlaceCounts) {
  const FakeModel model(small_builder(DType::kFloat32));
  run_ways(
      [&](FakeRank& rank, int r, const Way& way) {
        const Weights& weights = rank.engine().weights();
        const Gradients wanted = all_gradients(model, 3, 0, 0);
        pass(rank, r == 0 ? not_finite(model) : Gradients(model.params.size()), way, true);
        for (int p = 0; p < model.count(); ++p) {
          const auto& values = wanted[static_cast<std::size_t>(p)];
          if (!values) continue;
          const Values mine = part_of(rank, *values, weights.owned_range(p));
          edits_of(rank).store(weights.unit_of(p).id, weights.slot_index_of(p), mine.data());
          rank.settle();
        }
        EXPECT_TRUE(rank.engine().step(groups_of(0), 1.0, false).applied);
        if (way.kept_in != DType::kFloat32) return;
        ReferenceStep reference(model, 1, {});
        reference.add({wanted}, true);
        reference.step(groups_of(0), 1.0);
        expect_same_weights(rank, reference);
      },
      model);
}

TEST(GradientEdits, ARankThatReadsIsServedByThoseThatStep) {
  const FakeModel model(small_builder(DType::kFloat32));
  for (const int readers : {1, 2, 3}) {
    for (const bool reduced : {true, false}) {
      run_ways(
          [&](FakeRank& rank, int r, const Way& way) {
            ReferenceStep reference(model, 3, {});
            std::vector<Gradients> by_rank;
            for (int i = 0; i < 3; ++i) by_rank.push_back(all_gradients(model, 0, 0, i));
            const Gradients& mine = by_rank[static_cast<std::size_t>(r)];
            if (reduced) {
              pass(rank, mine, way, true);
            } else {  // gradients that wait for their reduction are reduced for the reader
              rank.forward();
              rank.backward(
                  false, [&](int p) { rank.add(p, *mine[static_cast<std::size_t>(p)]); },
                  /*synchronise=*/false);
            }
            std::map<int, Values> seen;
            for (int times = 0; times < 2 && r < readers; ++times) {
              rank.engine().gradient_check().read(0, [&](const Unit& unit, const float* flat) {
                rank.settle();
                for (const plan::Slot& slot : unit.layout.slots()) {
                  seen[slot.param].assign(flat + slot.offset.value, flat + slot.end().value);
                }
              });
            }
            rank.engine().step(groups_of(0), 1.0, false);
            if (way.kept_in != DType::kFloat32) return;
            reference.add(by_rank, true);
            reference.step(groups_of(0), 1.0);
            expect_same_weights(rank, reference);
            if (r >= readers) return;
            for (const auto& [param, values] : seen) {
              for (std::size_t i = 0; i < values.size(); ++i) {
                float sum = 0.0F;
                for (const Gradients& gradients : by_rank)
                  sum += (*gradients[static_cast<std::size_t>(param)])[i];
                ASSERT_FLOAT_EQ(values[i], sum / 3.0F) << param << ' ' << i;
              }
            }
            EXPECT_FALSE(seen.empty());
          },
          model, 3);
    }
  }
}

}  // namespace
}  // namespace strata::engine::fake
