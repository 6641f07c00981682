#include "strata/kernels/states8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "kernels/adam_tensor.h"
#include "kernels/references.h"
#include "strata/base/thread_pool.h"

namespace strata::kernels {
namespace {

// The codes and scales of a tensor's states.
struct Kept {
  std::vector<std::uint8_t> first, second;
  std::vector<float> scales, scales_sq;

  explicit Kept(std::size_t numel)
      : first(numel), second(numel), scales(blocks8(numel)), scales_sq(blocks8(numel)) {}
  States8 states() { return {{first.data(), scales.data()}, {second.data(), scales_sq.data()}}; }
  bool operator==(const Kept&) const = default;
};

// From the definition: decoded, updated element by element in fp32, and encoded.
void update8_reference(UpdateSpans spans, const UpdateScalars& scalars) {
  const States8 states = std::exchange(spans.states8, {});
  std::vector<float> first(spans.numel());
  std::vector<float> second(spans.numel());
  decode8(signed_map8(), states.exp_avg, first);
  spans.exp_avg = first;
  if (scalars.formula == Formula::kAdam) {
    decode8(unsigned_map8(), states.exp_avg_sq, second);
    spans.exp_avg_sq = second;
  }
  update_reference(spans, scalars);
  encode8(signed_map8(), first, states.exp_avg, false);
  if (scalars.formula == Formula::kAdam)
    encode8(unsigned_map8(), second, states.exp_avg_sq, scalars.keeps_positive);
}

// The middle of part k - n of the n = 2^e into which a decade is divided, where e is that of k.
float middle(int k, int decades_before) {
  int exponent = 0;
  while ((2 << exponent) <= k) ++exponent;
  const double n = std::pow(2.0, exponent);
  const double in_decade = 0.1 + 0.9 * (k - n + 0.5) / n;
  return static_cast<float>(std::pow(10.0, exponent - decades_before - 6) * in_decade);
}

TEST(States8, TheMapsAreDynamic) {
  const Map8& with_sign = signed_map8();
  const Map8& without = unsigned_map8();
  for (std::size_t k = 1; k < 128; ++k) {
    EXPECT_FLOAT_EQ(with_sign.values[127 + k], middle(static_cast<int>(k), 0));
    EXPECT_EQ(with_sign.values[127 - k], -with_sign.values[127 + k]);
  }
  for (std::size_t code = 1; code < 255; ++code)
    EXPECT_FLOAT_EQ(without.values[code], middle(static_cast<int>(code) + 1, 1));
  EXPECT_EQ(with_sign.values[127], 0.0F);
  EXPECT_EQ(without.values[0], 0.0F);
  EXPECT_FLOAT_EQ(with_sign.values[0], -0.99296875F);
  EXPECT_FLOAT_EQ(with_sign.values[128], 5.5e-7F);
  EXPECT_FLOAT_EQ(without.values[1], 3.25e-7F);
  for (const Map8* map : {&with_sign, &without}) {
    EXPECT_EQ(map->values[255], 1.0F);
    EXPECT_TRUE(std::ranges::is_sorted(map->values, std::less_equal<>()));
  }
}

TEST(States8, ACodeIsThatOfTheNearestValue) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> exponents(-9.0F, 0.0F);
  for (const Map8* map : {&signed_map8(), &unsigned_map8()}) {
    for (std::size_t code = 0; code < 256; ++code)
      EXPECT_EQ(code8(*map, map->values[code], 1.0F, false), code);
    for (int i = 0; i < 200'000; ++i) {
      float value = std::pow(10.0F, exponents(random));
      if (i % 2 == 0 && map->zero != 0.0F) value = -value;
      const auto distance = [&](float other) { return std::fabs(double{other} - double{value}); };
      const float nearest = *std::ranges::min_element(map->values, {}, distance);
      const float found = map->values[code8(*map, value, 1.0F, false)];
      ASSERT_LE(distance(found), distance(nearest) * (1 + 1e-4)) << value;
    }
  }
}

TEST(States8, AScaleIsTheLargestMagnitudeOfItsBlock) {
  std::vector<float> values(300, 0.0F);
  values[3] = -2.0F;
  values[256] = std::numeric_limits<float>::infinity();
  values[257] = 1.0F;
  Kept kept(values.size());
  encode8(signed_map8(), values, {kept.first.data(), kept.scales.data()}, false);
  EXPECT_EQ(kept.scales, (std::vector<float>{2.0F, std::numeric_limits<float>::max()}));
  EXPECT_EQ(kept.first[3], 0);
  EXPECT_EQ(kept.first[4], 127);
  EXPECT_EQ(kept.first[256], 255);
  EXPECT_EQ(kept.first[257], 127);
  const std::vector<float> none(256, 0.0F);
  encode8(unsigned_map8(), none, {kept.second.data(), kept.scales_sq.data()}, true);
  EXPECT_EQ(kept.scales_sq[0], 0.0F);
  EXPECT_EQ(kept.second[0], 0);
}

TEST(States8, EveryTargetGivesTheBitsOfTheDefinition) {
  for_every_target([] {
    ThreadPool pool(3);
    for (const Formula formula : {Formula::kAdam, Formula::kLion}) {
      for (const std::size_t numel : {std::size_t{0}, std::size_t{1}, std::size_t{255},
                                      std::size_t{256}, std::size_t{70001}}) {
        for (const bool narrow : {false, true}) {
          for (const bool keeps : {true, false}) {
            Tensor found(numel);
            if (numel > 300) found.gradient[300] = 1e4F;
            Tensor expected = found;
            std::vector<std::uint16_t> gradient16;
            for (float& value : expected.gradient) {
              gradient16.push_back(bfloat16_from(value).bits);
              if (narrow) value = to_float(bfloat16_from(value));
            }
            Kept kept(numel);
            Kept kept_there(numel);
            for (std::int64_t step = 1; step <= 3; ++step) {
              const UpdateScalars scalars{
                  .weight_decay = 0.1, .formula = formula, .keeps_positive = keeps, .step = step};
              const auto spans_of = [](Tensor& tensor, Kept& states) {
                UpdateSpans spans = tensor.spans_with_copy(DType::kBFloat16);
                spans.exp_avg = spans.exp_avg_sq = {};
                spans.states8 = states.states();
                return spans;
              };
              UpdateSpans spans = spans_of(found, kept);
              if (narrow) {
                spans.gradient = {};
                spans.gradient16 = {std::as_bytes(std::span(gradient16)).data(), DType::kBFloat16,
                                    numel};
              }
              update_step(spans, scalars, step == 2 ? &pool : nullptr);
              update8_reference(spans_of(expected, kept_there), scalars);
            }
            expect_same(found.weight, expected.weight, "weight");
            EXPECT_EQ(found.weight16, expected.weight16);
            EXPECT_TRUE(kept == kept_there) << numel;
          }
        }
      }
    }
  });
}

// An element with a gradient 1e6 times its neighbours'.
TEST(States8, ASecondMomentIsNeverRoundedToZero) {
  for (const bool keeps : {true, false}) {
    Tensor tensor(256);
    std::ranges::fill(tensor.weight, 0.0F);
    std::ranges::fill(tensor.gradient, 1e-6F);
    tensor.gradient[9] = 1.0F;
    Kept kept(256);
    UpdateSpans spans = tensor.spans();
    spans.exp_avg = spans.exp_avg_sq = {};
    spans.states8 = kept.states();
    float largest = 0.0F;
    for (std::int64_t step = 1; step <= 50; ++step) {
      const std::vector<float> before = tensor.weight;
      update_step(spans,
                  {.lr = 1.0, .beta2 = 0.95, .eps = 1e-12, .keeps_positive = keeps, .step = step},
                  nullptr);
      for (std::size_t i = 0; i < before.size(); ++i)
        largest = std::max(largest, std::fabs(tensor.weight[i] - before[i]));
    }
    if (keeps)
      EXPECT_LT(largest, 3.0F);
    else
      EXPECT_GT(largest, 1.2F);
    EXPECT_EQ(kept.second[0] > 0, keeps);
  }
}

}  // namespace
}  // namespace strata::kernels
