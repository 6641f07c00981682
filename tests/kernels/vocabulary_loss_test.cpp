#include "strata/kernels/vocabulary_loss.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "strata/base/thread_pool.h"

namespace strata::kernels {
namespace {

constexpr std::int64_t kRows = 3;
constexpr std::int64_t kColumns = 5;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Logits = std::array<float, kRows * kColumns>;

struct Found {
  Logits logits{};
  std::array<float, kRows> losses{};
};

Found run(const Logits& logits, const std::array<std::int64_t, kRows>& labels, float scale,
          float softcap, bool gradients) {
  Found found{logits};
  ThreadPool pool(2);
  vocabulary_losses({.logits = reinterpret_cast<std::byte*>(found.logits.data()),
                     .dtype = DType::kFloat32,
                     .rows = kRows,
                     .columns = kColumns,
                     .labels = labels.data(),
                     .losses = found.losses.data(),
                     .scale = scale,
                     .softcap = softcap,
                     .gradients = gradients},
                    &pool);
  return found;
}

double value_of(double logit, double scale, double softcap) {
  return softcap == 0.0 ? scale * logit : softcap * std::tanh(scale * logit / softcap);
}

double loss_of(const Logits& logits, std::size_t row, std::size_t label, double scale,
               double softcap) {
  double sum = 0.0;
  for (std::size_t i = 0; i < kColumns; ++i)
    sum += std::exp(value_of(logits[row * kColumns + i], scale, softcap));
  return std::log(sum) - value_of(logits[row * kColumns + label], scale, softcap);
}

const Logits kLogits = {1.0F, -2.0F, 0.5F, 3.0F, 0.0F,  -1.0F, 4.0F, 2.0F,
                        2.5F, -0.5F, 7.0F, 7.5F, -3.0F, 6.0F,  1.5F};

TEST(VocabularyLoss, LossesAndGradientsAreThoseOfTheFormula) {
  const std::array<std::int64_t, kRows> labels = {3, 0, 4};
  for (const float softcap : {0.0F, 2.0F}) {
    for (const float scale : {1.0F, 0.5F}) {
      const Found kept = run(kLogits, labels, scale, softcap, false);
      EXPECT_EQ(kept.logits, kLogits);
      const Found found = run(kLogits, labels, scale, softcap, true);
      EXPECT_EQ(found.losses, kept.losses);
      for (std::size_t row = 0; row < kRows; ++row) {
        const auto label = static_cast<std::size_t>(labels[row]);
        EXPECT_NEAR(found.losses[row], loss_of(kLogits, row, label, scale, softcap), 1e-5);
        for (std::size_t i = 0; i < kColumns; ++i) {
          const auto moved = [&](float by) {
            Logits logits = kLogits;
            logits[row * kColumns + i] += by;
            return loss_of(logits, row, label, scale, softcap);
          };
          const double slope = (moved(0.0078125F) - moved(-0.0078125F)) / 0.015625;
          EXPECT_NEAR(found.logits[row * kColumns + i], slope, 2e-4);
        }
      }
    }
  }
}

TEST(VocabularyLoss, IgnoredAndUnknownLabels) {
  const Found found = run(kLogits, {-100, kColumns, 1}, 1.0F, 0.0F, true);
  EXPECT_EQ(found.losses[0], 0.0F);
  for (std::size_t i = 0; i < kColumns; ++i) EXPECT_EQ(found.logits[i], 0.0F);
  EXPECT_TRUE(std::isnan(found.losses[1]));
  EXPECT_FALSE(std::isnan(found.losses[2]));
}

TEST(VocabularyLoss, EntriesThatAreRuledOutAndNumbersThatAreNone) {
  Logits logits = kLogits;
  logits[0] = -kInfinity;  // as masks of a vocabulary are
  logits[5] = std::nanf("");
  for (std::size_t i = 10; i < 15; ++i) logits[i] = -kInfinity;
  const Found found = run(logits, {3, 1, 0}, 1.0F, 0.0F, true);
  EXPECT_NEAR(found.losses[0], loss_of(logits, 0, 3, 1.0, 0.0), 1e-5);
  EXPECT_EQ(found.logits[0], 0.0F);
  EXPECT_TRUE(std::isnan(found.losses[1]));
  EXPECT_TRUE(std::isnan(found.losses[2]));
}

}  // namespace
}  // namespace strata::kernels
