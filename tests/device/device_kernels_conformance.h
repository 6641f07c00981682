// The kernels of every Device must give the results of the host's kernels; this is a typed suite. A
// device joins by its harness (see device_conformance.h) and one line:
//   INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, DeviceKernelsConformance, CpuHarness);
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "device/device_fixture.h"
#include "kernels/references.h"
#include "strata/device/device.h"
#include "strata/kernels/elementwise.h"

namespace strata::device {

template <typename Harness>
class DeviceKernelsConformance : public DeviceConformance<Harness> {};

TYPED_TEST_SUITE_P(DeviceKernelsConformance);

TYPED_TEST_P(DeviceKernelsConformance, CastsEveryPairOfTypesAsTheHostKernelsDo) {
  for (const DType from : kFloatingTypes) {
    for (const DType to : kFloatingTypes) {
      for (const std::size_t count : kCounts) {
        const auto content = this->floating_content(from, count, 5);
        std::vector<std::byte> expected(bytes_of(Numel(count), to).size());
        kernels::cast(expected.data(), to, content.data(), from, Numel(count), nullptr);
        const auto source = this->upload(content);
        const auto target = this->allocate(Bytes(expected.size()));
        this->device_->cast(target->bytes().data(), to, source->bytes().data(), from, Numel(count),
                            *this->stream_);
        EXPECT_EQ(this->download(target->bytes()), expected)
            << name_of(from) << " to " << name_of(to) << ", " << count << " elements";
      }
    }
  }
}

TYPED_TEST_P(DeviceKernelsConformance, AccumulatesEveryPairOfTypesAsTheHostKernelsDo) {
  for (const DType from : kTrainingTypes) {
    for (const DType to : kTrainingTypes) {
      for (const std::size_t count : kCounts) {
        const auto content = this->floating_content(from, count, 6);
        auto expected = this->floating_content(to, count, 7);
        const auto source = this->upload(content);
        const auto target = this->upload(expected);
        kernels::accumulate(expected.data(), to, content.data(), from, Numel(count), nullptr);
        this->device_->accumulate(target->bytes().data(), to, source->bytes().data(), from,
                                  Numel(count), *this->stream_);
        EXPECT_EQ(this->download(target->bytes()), expected)
            << name_of(from) << " onto " << name_of(to) << ", " << count << " elements";
      }
    }
  }
}

TYPED_TEST_P(DeviceKernelsConformance, ScalesEachElementWithOneRounding) {
  for (const std::size_t count : kCounts) {
    const auto values = this->random_floats(count, 17);
    const auto source = this->upload(this->raw(values));
    const auto target = this->upload(this->raw(this->random_floats(count, 18)));
    const std::byte* const sources[] = {source->bytes().data()};
    const auto scale_to = [&](Memory& to) {
      this->device_->sum_in_order(this->floats(to), sources, DType::kFloat32, 0.3F, false,
                                  *this->stream_);
    };
    scale_to(*target);
    auto expected = values;
    for (float& value : expected) value *= 0.3F;
    EXPECT_EQ(this->download_floats(*target), expected) << count << " elements";
    scale_to(*source);
    EXPECT_EQ(this->download_floats(*source), expected) << count << " elements in place";
  }
}

TYPED_TEST_P(DeviceKernelsConformance, SumsInTheOrderOfTheSources) {
  for (const DType dtype : kTrainingTypes) {
    for (const std::size_t count : kCounts) {
      std::vector<std::unique_ptr<Memory>> there;
      std::vector<std::vector<std::byte>> here;
      std::vector<const std::byte*> sources;
      std::vector<const std::byte*> host_sources;
      for (std::uint32_t s = 0; s < 5; ++s) {
        const auto values = this->random_floats(count, 40 + s);
        here.emplace_back(bytes_of(Numel(count), dtype).size());
        kernels::cast(here.back().data(), dtype, this->raw(values).data(), DType::kFloat32,
                      Numel(count), nullptr);
        there.push_back(this->upload(here.back()));
        sources.push_back(there.back()->bytes().data());
        host_sources.push_back(here.back().data());
      }
      auto expected = this->random_floats(count, 50);
      const auto result = this->upload(this->raw(expected));
      for (const bool accumulate : {true, false}) {
        this->device_->sum_in_order(this->floats(*result), sources, dtype, 0.3F, accumulate,
                                    *this->stream_);
        kernels::sum_in_order_reference(expected, host_sources, dtype, 0.3F, accumulate);
        EXPECT_EQ(this->download_floats(*result), expected) << name_of(dtype) << " " << count;
      }
    }
  }
}

TYPED_TEST_P(DeviceKernelsConformance, SumsOfSquaresMatchTheReferenceAndSeeWhatIsNotFinite) {
  for (const std::size_t count : kCounts) {
    auto gradient = this->random_floats(count, 12);
    auto there = this->upload(this->raw(gradient));
    const auto expected = kernels::sum_of_squares_reference(gradient);
    const auto memory = this->device_->allocate(Bytes(3 * sizeof(double)), memory::Kind::kStaging);
    const auto sum_of = [&] {
      const std::span<const float> all[] = {this->floats(*there), {}, this->floats(*there)};
      auto* const target = reinterpret_cast<double*>(memory->bytes().data());
      this->device_->sums_of_squares({target, 3}, all, *this->stream_);
      double sums[3];
      std::memcpy(sums, this->download(memory->bytes()).data(), sizeof(sums));
      EXPECT_EQ(sums[1], 0.0);
      EXPECT_EQ(std::isfinite(sums[2]), std::isfinite(sums[0]));
      return sums[0];
    };
    EXPECT_NEAR(sum_of(), expected, 1e-12 * expected);
    if (count == 0) continue;
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      gradient[count / 2] = bad;
      there = this->upload(this->raw(gradient));
      EXPECT_FALSE(std::isfinite(sum_of()));
    }
  }
}

TYPED_TEST_P(DeviceKernelsConformance, FingerprintsOfPiecesAreThoseOfTheHost) {
  const auto content = this->random_bytes(100'003_B, 22);
  const auto memory = this->upload(content);
  for (const std::size_t offset : {0UL, 3UL}) {
    const auto host = std::span(content).subspan(offset);
    const auto there = std::span<const std::byte>(memory->bytes()).subspan(offset);
    for (const Bytes piece : {8_B, 4096_B, 1_MiB}) {
      const std::span<const std::byte> runs[] = {there, {}, there.first(7)};
      const auto got = this->device_->fingerprints(runs, piece, *this->stream_);
      const std::size_t pieces = (host.size() + piece.size() - 1) / piece.size();
      ASSERT_EQ(got.size(), pieces + 1);
      EXPECT_EQ(got.back(), kernels::fingerprint(host.first(7), nullptr));
      for (std::size_t i = 0; i < pieces; ++i) {
        const std::size_t at = i * piece.size();
        const auto part = host.subspan(at, std::min(piece.size(), host.size() - at));
        ASSERT_EQ(got[i], kernels::fingerprint(part, nullptr)) << piece.value << ", " << i;
      }
    }
  }
  EXPECT_TRUE(this->device_->fingerprints({}, 8_B, *this->stream_).empty());
}

TYPED_TEST_P(DeviceKernelsConformance, TheFactorOfManyGradientsIsThatOfTheHost) {
  // More arrays than one kernel takes, of sizes around those of a chunk.
  std::vector<std::vector<float>> gradients;
  for (std::size_t i = 0; i < 300; ++i)
    gradients.push_back(this->random_floats(i % 50 == 7 ? 65536 + i : i % 3 * 1000,
                                            static_cast<std::uint32_t>(60 + i)));
  std::vector<std::unique_ptr<Memory>> there;
  std::vector<std::span<const float>> all;
  std::vector<double> expected;
  for (const auto& gradient : gradients) {
    there.push_back(this->upload(this->raw(gradient)));
    all.push_back(this->floats(*there.back()));
    expected.push_back(kernels::sum_of_squares_reference(gradient));
  }
  const auto memory = this->device_->allocate(Bytes(4096), memory::Kind::kStaging);
  auto* const result = reinterpret_cast<kernels::GradientFactor*>(memory->bytes().data());
  const std::span<double> sums(reinterpret_cast<double*>(memory->bytes().data() + 64), all.size());
  for (const double clipping : {0.0, 1e-3, 1e9}) {
    this->device_->sums_of_squares(sums, all, *this->stream_);
    this->device_->gradient_factor(*result, sums, 8.0, clipping, *this->stream_);
    std::vector<std::byte> bytes = this->download(memory->bytes());
    kernels::GradientFactor got;
    std::memcpy(&got, bytes.data(), sizeof(got));
    const auto wanted = kernels::gradient_factor(expected, 8.0, clipping);
    EXPECT_NEAR(got.sum_of_squares, wanted.sum_of_squares, 1e-12 * wanted.sum_of_squares);
    EXPECT_FLOAT_EQ(got.factor, wanted.factor);
  }
  const auto nothing = this->upload(this->raw(std::vector<float>{1.0F, NAN}));
  all[5] = this->floats(*nothing);
  this->device_->sums_of_squares(sums, all, *this->stream_);
  this->device_->gradient_factor(*result, sums, 8.0, 1.0, *this->stream_);
  kernels::GradientFactor got;
  std::memcpy(&got, this->download(memory->bytes()).data(), sizeof(got));
  EXPECT_TRUE(std::isnan(got.factor));
}

TYPED_TEST_P(DeviceKernelsConformance, RemaindersAreThoseOfTheHost) {
  for (const DType from : kFloatingTypes) {
    for (const std::size_t count : kCounts) {
      for (const std::size_t first : {0U, 3U, 8U}) {
        const Numel all(first + count);
        auto expected = this->random_bytes(kernels::remainder_bytes(all), 4);
        const auto target = this->upload(expected);
        const auto content = this->floating_content(from, count, 5);
        const auto source = this->upload(content);
        kernels::store_remainder(kernels::remainder_over(expected, all), Numel(first),
                                 content.data(), from, Numel(count), nullptr);
        this->device_->store_remainder(kernels::remainder_over(target->bytes(), all), Numel(first),
                                       source->bytes().data(), from, Numel(count), *this->stream_);
        EXPECT_EQ(this->download(target->bytes()), expected)
            << name_of(from) << ", " << count << " elements from " << first;
      }
    }
  }
}

TYPED_TEST_P(DeviceKernelsConformance, LossesOfAVocabularyAreThoseOfTheHost) {
  const std::int64_t rows = 7;
  for (const DType dtype : kTrainingTypes) {
    for (const std::int64_t columns : {1, 3, 8, 77, 5003}) {
      for (const float softcap : {0.0F, 3.0F}) {
        for (const bool gradients : {false, true}) {
          const auto numel = static_cast<std::size_t>(rows * columns);
          const auto values = this->random_floats(numel, 19);
          std::vector<std::byte> logits(bytes_of(Numel(numel), dtype).size());
          kernels::cast(logits.data(), dtype, this->raw(values).data(), DType::kFloat32,
                        Numel(numel), nullptr);
          // The last column, one that is ignored, and two beyond the vocabulary.
          const std::vector<std::int64_t> labels = {0,           columns - 1, -100, columns,
                                                    columns / 2, -1,          0};
          std::vector<float> losses(rows, -1.0F);
          const auto there = this->upload(logits);
          const auto labels_there = this->upload(std::as_bytes(std::span(labels)));
          const auto losses_there = this->upload(this->raw(losses));
          kernels::VocabularyRows task{
              .logits = there->bytes().data(),
              .dtype = dtype,
              .rows = rows,
              .columns = columns,
              .labels = reinterpret_cast<const std::int64_t*>(labels_there->bytes().data()),
              .losses = this->floats(*losses_there).data(),
              .scale = 1.5F,
              .softcap = softcap,
              .gradients = gradients};
          this->device_->vocabulary_losses(task, *this->stream_);
          task.logits = logits.data();
          task.labels = labels.data();
          task.losses = losses.data();
          kernels::vocabulary_losses(task, nullptr);
          const auto found = this->download_floats(*losses_there);
          for (std::size_t i = 0; i < losses.size(); ++i) {
            if (std::isnan(losses[i])) {
              EXPECT_TRUE(std::isnan(found[i])) << i;
            } else {
              EXPECT_NEAR(found[i], losses[i], 1e-5F * (1.0F + losses[i])) << i;
            }
          }
          const auto widened = [&](const std::vector<std::byte>& from) {
            std::vector<float> result(numel);
            kernels::cast(reinterpret_cast<std::byte*>(result.data()), DType::kFloat32, from.data(),
                          dtype, Numel(numel), nullptr);
            return result;
          };
          const auto expected = widened(logits);
          const auto given = widened(this->download(there->bytes()));
          const float tolerance = dtype == DType::kFloat32 ? 1e-5F : 1e-2F;
          for (std::size_t i = 0; i < numel; ++i)
            ASSERT_NEAR(given[i], expected[i], tolerance * std::max(1e-3F, std::abs(expected[i])))
                << name_of(dtype) << ", " << columns << " columns, element " << i;
        }
      }
    }
  }
}

REGISTER_TYPED_TEST_SUITE_P(DeviceKernelsConformance, CastsEveryPairOfTypesAsTheHostKernelsDo,
                            AccumulatesEveryPairOfTypesAsTheHostKernelsDo,
                            ScalesEachElementWithOneRounding, SumsInTheOrderOfTheSources,
                            SumsOfSquaresMatchTheReferenceAndSeeWhatIsNotFinite,
                            TheFactorOfManyGradientsIsThatOfTheHost, RemaindersAreThoseOfTheHost,
                            FingerprintsOfPiecesAreThoseOfTheHost,
                            LossesOfAVocabularyAreThoseOfTheHost);

}  // namespace strata::device
