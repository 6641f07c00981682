#include "strata/plan/flat_layout.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "strata/base/error.h"

namespace strata::plan {
namespace {

constexpr Bytes kAlignment = 256_B;

std::vector<ParamSpec> model_of(const std::vector<std::int64_t>& sizes, DType dtype) {
  std::vector<ParamSpec> model;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    ParamSpec spec;
    spec.name = "p" + std::to_string(i);
    spec.shape = {sizes[i]};
    spec.dtype = dtype;
    model.push_back(std::move(spec));
  }
  return model;
}

std::vector<int> all_of(const std::vector<ParamSpec>& model) {
  std::vector<int> indices(model.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

std::vector<ParamSpec> random_model(std::mt19937& random, DType dtype) {
  std::uniform_int_distribution<int> count(0, 12);
  std::uniform_int_distribution<int> kind(0, 4);
  std::uniform_int_distribution<int> group(0, 2);
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(count(random)));
  for (std::int64_t& size : sizes) {
    const std::int64_t choices[] = {0, 1, 17, 64, std::uniform_int_distribution(2, 3000)(random)};
    size = choices[kind(random)];
  }
  std::vector<ParamSpec> model = model_of(sizes, dtype);
  for (ParamSpec& spec : model) spec.group = group(random);
  return model;
}

// The content of one element of the flat buffer: an element of a parameter, or padding (-1).
struct Element {
  int slot = -1;
  std::int64_t index = 0;
};

std::vector<Element> naive(const FlatLayout& layout) {
  std::vector<Element> flat(layout.padded().size());
  for (std::size_t s = 0; s < layout.slots().size(); ++s) {
    const Slot& slot = layout.slots()[s];
    for (std::int64_t i = 0; i < slot.numel.value; ++i) {
      Element& e = flat.at((slot.offset + Numel(i)).size());
      EXPECT_EQ(e.slot, -1) << "parameters overlap";
      e = {static_cast<int>(s), i};
    }
  }
  return flat;
}

TEST(FlatLayout, AlignsEveryParameterTo256Bytes) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const auto model = model_of({17, 1, 0, 1000, 17}, dtype);
    const FlatLayout layout(model, all_of(model), dtype, 3);
    for (const Slot& slot : layout.slots()) {
      EXPECT_EQ(bytes_of(slot.offset, dtype) % kAlignment, 0_B) << name_of(dtype);
    }
    EXPECT_EQ(layout.used(), Numel(1035));
  }
}

TEST(FlatLayout, PadsToEqualAlignedShardsOfEveryRank) {
  for (int world = 1; world <= 7; ++world) {
    const auto model = model_of({1, 17}, DType::kBFloat16);
    const FlatLayout layout(model, all_of(model), DType::kBFloat16, world);
    EXPECT_EQ(layout.shard() * world, layout.padded());
    EXPECT_EQ(layout.shard_bytes() % kAlignment, 0_B);
    EXPECT_EQ(layout.flat_bytes(), layout.shard_bytes() * world);
  }
}

TEST(FlatLayout, NoSliceCutsABlockOfStatesIn8Bits) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    std::vector<ParamSpec> model = model_of({4097, 300, 1}, dtype);
    for (ParamSpec& spec : model) spec.states = StateForm::k8Bit;
    for (const int world : {1, 2, 3}) {
      const FlatLayout layout(model, all_of(model), dtype, world);
      EXPECT_EQ(layout.shard().value % kBlock8, 0);
      for (const Slot& slot : layout.slots()) EXPECT_EQ(slot.offset.value % kBlock8, 0);
    }
  }
}

TEST(FlatLayout, AUnitOfNothingButEmptyParametersTakesNoBytes) {
  const auto model = model_of({0, 0}, DType::kFloat32);
  const FlatLayout layout(model, all_of(model), DType::kFloat32, 3);
  EXPECT_EQ(layout.padded(), Numel(0));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(layout.pieces(rank).empty());
    EXPECT_TRUE(layout.segments(rank, model).empty());
  }
}

TEST(FlatLayout, KeepsTheOrderAndTheIndicesItIsGiven) {
  const auto model = model_of({5, 6, 7}, DType::kFloat32);
  const FlatLayout layout(model, {2, 0}, DType::kFloat32, 1);
  ASSERT_EQ(layout.slots().size(), 2U);
  EXPECT_EQ(layout.slots()[0].param, 2);
  EXPECT_EQ(layout.slots()[1].param, 0);
  EXPECT_EQ(layout.slots()[1].offset, Numel(64));
}

TEST(FlatLayout, RefusesAParameterOfAnotherDType) {
  const auto model = model_of({5}, DType::kFloat32);
  EXPECT_THROW(FlatLayout(model, {0}, DType::kBFloat16, 1), InternalError);
}

TEST(FlatLayout, PiecesOfAllRanksTileEveryParameterExactly) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const DType dtype = round % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    const auto model = random_model(random, dtype);
    for (int world = 1; world <= 7; ++world) {
      const FlatLayout layout(model, all_of(model), dtype, world);
      const std::vector<Element> flat = naive(layout);
      std::vector<Element> tiled(flat.size());
      for (int rank = 0; rank < world; ++rank) {
        Numel last;
        for (const ShardRange& piece : layout.pieces(rank)) {
          ASSERT_LT(piece.param_begin, piece.param_end);
          ASSERT_GE(piece.shard_offset, last) << "pieces are in order";
          last = piece.shard_offset + (piece.param_end - piece.param_begin);
          ASSERT_LE(last, layout.shard());
          for (Numel i = piece.param_begin; i < piece.param_end; i += Numel(1)) {
            const Numel at = layout.shard() * rank + piece.shard_offset + (i - piece.param_begin);
            tiled[at.size()] = {piece.slot, i.value};
          }
        }
      }
      for (std::size_t i = 0; i < flat.size(); ++i) {
        ASSERT_EQ(tiled[i].slot, flat[i].slot);
        ASSERT_EQ(tiled[i].index, flat[i].index);
      }
    }
  }
}

TEST(FlatLayout, SegmentsGiveEveryElementItsParamGroupAndDoNotOverlap) {
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    const auto model = random_model(random, DType::kFloat32);
    for (int world = 1; world <= 7; ++world) {
      const FlatLayout layout(model, all_of(model), DType::kFloat32, world);
      const std::vector<Element> flat = naive(layout);
      for (int rank = 0; rank < world; ++rank) {
        std::vector<int> param(layout.shard().size(), -1);
        Numel last;
        for (const ParamSegment& segment : layout.segments(rank, model)) {
          if (last > Numel()) {
            ASSERT_EQ(segment.begin, last) << "a segment ends where the next one begins";
          }
          ASSERT_EQ(segment.group, model[static_cast<std::size_t>(segment.param)].group);
          ASSERT_LT(segment.begin, segment.end);
          ASSERT_LE(segment.end, layout.shard());
          last = segment.end;
          for (Numel i = segment.begin; i < segment.end; i += Numel(1)) {
            param[i.size()] = segment.param;
          }
        }
        for (std::size_t i = 0; i < param.size(); ++i) {
          const Element& e = flat[(layout.shard() * rank).size() + i];
          if (e.slot >= 0) {
            ASSERT_EQ(param[i], e.slot);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace strata::plan
