// The results that Adam of every Device must give, as a typed suite; beside
// device_kernels_conformance.h. A device joins by its harness (see device_conformance.h) and one
// line:
//   INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, DeviceAdamConformance, CpuHarness);
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "device/device_fixture.h"
#include "kernels/references.h"
#include "strata/device/device.h"
#include "strata/kernels/elementwise.h"

namespace strata::device {

template <typename Harness>
class DeviceAdamConformance : public DeviceConformance<Harness> {};

TYPED_TEST_SUITE_P(DeviceAdamConformance);

// Where Adam finds its numbers; memory of the host or of a device that holds them one after
// another.
struct AdamForm {
  DType weights = DType::kFloat32;  // 16 bits: their copy, or themselves
  bool remainder = false;
  bool rounds = false;
  bool follows = false;
  bool narrow_moments = false;
  bool narrow_gradient = false;
  bool lion = false;

  Bytes bytes(Numel numel) const { return Bytes(32 * numel.value + 64); }
  kernels::UpdateSpans spans(std::span<std::byte> memory, Numel numel) const {
    const std::size_t count = numel.size();
    const auto floats = [&](std::size_t array) {
      return std::span(reinterpret_cast<float*>(memory.data()) + array * count, count);
    };
    const auto bytes = [&](std::size_t array) { return memory.data() + 4 * array * count; };
    kernels::UpdateSpans spans;
    if (!remainder && !rounds) spans.weight = floats(0);
    if (weights != DType::kFloat32) spans.weight16 = bytes(4);
    if (spans.weight16 != nullptr) spans.weight16_dtype = weights;
    spans.follows_weight16 = follows;
    spans.rounds_weight16 = rounds;
    if (remainder) spans.remainder = kernels::remainder_over(memory.subspan(20 * count), numel);
    if (narrow_moments) {
      spans.moments16 = {bytes(1), lion ? nullptr : bytes(2)};
    } else {
      spans.exp_avg = floats(1);
      if (!lion) spans.exp_avg_sq = floats(2);
    }
    if (narrow_gradient)
      spans.gradient16 = {bytes(3), weights, count};
    else
      spans.gradient = floats(3);
    return spans;
  }
};

// Elements a form: $STRATA_ADAM_BITS, which `make soak` sets.
inline Numel adam_bits() {
  const char* const text = std::getenv("STRATA_ADAM_BITS");
  return Numel(text == nullptr ? std::int64_t{4099} : std::int64_t{std::stoll(text)});
}

// Every NaN as one: processors differ in the bits of those that they make.
inline std::vector<std::uint32_t> bits_of(const void* memory, DType dtype, std::size_t count) {
  std::vector<float> values(count);
  kernels::cast_reference(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32,
                          static_cast<const std::byte*>(memory), dtype, Numel(count));
  std::vector<std::uint32_t> bits;
  for (const float value : values)
    bits.push_back(std::isnan(value) ? 0x7FC00000U : std::bit_cast<std::uint32_t>(value));
  return bits;
}

// Weights, masters and moments, as bits of fp32.
inline std::vector<std::uint32_t> results_of(const AdamForm& form, std::span<std::byte> memory,
                                             Numel numel) {
  const std::size_t count = numel.size();
  const kernels::UpdateSpans spans = form.spans(memory, numel);
  std::vector<std::uint32_t> results;
  const auto add = [&](const void* values, DType dtype) {
    const auto bits = bits_of(values, dtype, count);
    results.insert(results.end(), bits.begin(), bits.end());
  };
  const DType moments = form.narrow_moments ? DType::kBFloat16 : DType::kFloat32;
  add(memory.data() + 4 * count, moments);
  add(memory.data() + 8 * count, moments);
  if (spans.weight16 != nullptr) add(spans.weight16, form.weights);
  if (!spans.weight.empty()) add(spans.weight.data(), DType::kFloat32);
  if (form.remainder) {
    std::vector<float> masters(count);
    kernels::join_masters(masters, spans.weight16, spans.remainder);
    add(masters.data(), DType::kFloat32);
  }
  return results;
}

// The host's kernel is the measure, so that a step may be shared between both. Bits are random,
// every second number a subnormal one or near to them.
TYPED_TEST_P(DeviceAdamConformance, AdamGivesTheBitsOfTheHostForAnyBits) {
  constexpr DType kHalf = DType::kFloat16, kBrain = DType::kBFloat16;
  const std::vector<AdamForm> forms = {{},
                                       {kBrain},
                                       {kHalf},
                                       {kBrain, true},
                                       {kBrain, false, true},
                                       {kBrain, false, true, false, true},
                                       {kBrain, false, false, true},
                                       {kHalf, false, false, true}};
  const Numel numel = adam_bits();
  std::mt19937 random(20);
  for (std::size_t which = 0; which < 8 * forms.size(); ++which) {
    AdamForm form = forms[which / 8];
    form.narrow_gradient = which % 2 != 0 && form.weights != DType::kFloat32;
    form.lion = which % 8 > 3;
    std::vector<std::byte> host(form.bytes(numel).size());
    for (std::size_t i = 0; i + 4 <= host.size(); i += 4) {
      auto bits = static_cast<std::uint32_t>(random());
      if (i % 8 == 0) bits &= 0x81FFFFFFU;
      std::memcpy(host.data() + i, &bits, 4);
    }
    const auto there = this->upload(host);
    const kernels::UpdateScalars scalars{
        .weight_decay = 0.1,
        .decoupled = which % 4 < 2 || form.lion,
        .formula = form.lion ? kernels::Formula::kLion : kernels::Formula::kAdam,
        .step = 3,
        .gradient_scale = 0.5F};
    kernels::update_step(form.spans(host, numel), scalars, nullptr);
    this->device_->update_step(form.spans(there->bytes(), numel), scalars, *this->stream_);
    auto got = this->download(there->bytes());
    EXPECT_EQ(results_of(form, got, numel), results_of(form, host, numel)) << "form " << which;
  }
}

// Codes and scales, too. The last block is short.
TYPED_TEST_P(DeviceAdamConformance, StatesOf8BitsAreTheHosts) {
  constexpr DType kHalf = DType::kFloat16, kBrain = DType::kBFloat16;
  const std::vector<AdamForm> forms = {
      {}, {kBrain}, {kHalf}, {kBrain, true}, {kBrain, false, true}, {kBrain, false, false, true}};
  for (const std::size_t count : {std::size_t{1}, std::size_t{256}, std::size_t{70'001}}) {
    const Numel numel(count);
    for (std::size_t which = 0; which < 8 * forms.size(); ++which) {
      AdamForm form = forms[which / 8];
      form.narrow_gradient = which % 2 != 0 && form.weights != DType::kFloat32;
      form.lion = which % 4 > 1;
      const std::size_t whole = (count + 255) / 256 * 256;
      const std::size_t base = (form.bytes(numel).size() + 255) / 256 * 256;
      const auto spans_of = [&](std::span<std::byte> memory) {
        kernels::UpdateSpans spans = form.spans(memory, numel);
        auto* const codes = reinterpret_cast<std::uint8_t*>(memory.data() + base);
        auto* const scales = reinterpret_cast<float*>(memory.data() + base + 2 * whole);
        spans.states8.exp_avg = {codes, scales};
        if (!form.lion) spans.states8.exp_avg_sq = {codes + whole, scales + whole / 256};
        spans.exp_avg = spans.exp_avg_sq = {};
        return spans;
      };
      std::vector<std::byte> host(base + 2 * whole + whole / 32);
      const auto numbers = this->random_floats(host.size() / 4, 9);
      std::memcpy(host.data(), numbers.data(), host.size());
      for (float& scale : std::span(spans_of(host).states8.exp_avg.scales, whole / 128))
        scale = std::abs(scale);
      const auto narrow = [&](std::size_t array) {  // numbers: processors differ in the bits of NaN
        kernels::cast_reference(host.data() + 4 * array * count, form.weights,
                                this->raw(numbers).data(), DType::kFloat32, numel);
      };
      if (form.weights != DType::kFloat32) narrow(4);
      if (form.narrow_gradient) narrow(3);
      const auto there = this->upload(host);
      const kernels::UpdateScalars scalars{
          .weight_decay = 0.1,
          .formula = form.lion ? kernels::Formula::kLion : kernels::Formula::kAdam,
          .keeps_positive = which % 8 < 4,
          .step = 3,
          .gradient_scale = 0.5F};
      kernels::update_step(spans_of(host), scalars, nullptr);
      this->device_->update_step(spans_of(there->bytes()), scalars, *this->stream_);
      EXPECT_EQ(this->download(there->bytes()), host) << "form " << which << ", " << count;
    }
  }
}

TYPED_TEST_P(DeviceAdamConformance, AdamGivesTheBitsOfTheReference) {
  for (const std::size_t count : kCounts) {
    auto weight = this->random_floats(count, 8);
    auto exp_avg = this->random_floats(count, 9);
    auto exp_avg_sq = this->random_floats(count, 10);
    for (float& value : exp_avg_sq) value = std::abs(value);
    const auto gradient = this->random_floats(count, 11);
    std::vector<std::byte> weight16(count * 2);
    const auto weight_there = this->upload(this->raw(weight));
    const auto avg_there = this->upload(this->raw(exp_avg));
    const auto sq_there = this->upload(this->raw(exp_avg_sq));
    const auto gradient_there = this->upload(this->raw(gradient));
    const auto weight16_there = this->upload(weight16);
    const kernels::UpdateScalars scalars{.weight_decay = 0.1, .step = 3, .gradient_scale = 0.5F};

    kernels::update_reference(
        {weight, exp_avg, exp_avg_sq, gradient, weight16.data(), DType::kBFloat16}, scalars);
    this->device_->update_step(
        {this->floats(*weight_there), this->floats(*avg_there), this->floats(*sq_there),
         this->floats(*gradient_there), weight16_there->bytes().data(), DType::kBFloat16},
        scalars, *this->stream_);

    EXPECT_EQ(this->download_floats(*weight_there), weight) << count;
    EXPECT_EQ(this->download_floats(*avg_there), exp_avg) << count;
    EXPECT_EQ(this->download_floats(*sq_there), exp_avg_sq) << count;
    // The 16-bit copy is that of the device's own weight.
    std::vector<std::byte> narrowed(count * 2);
    const auto weight_got = this->download_floats(*weight_there);
    kernels::cast(narrowed.data(), DType::kBFloat16, this->raw(weight_got).data(), DType::kFloat32,
                  Numel(count), nullptr);
    EXPECT_EQ(this->download(weight16_there->bytes()), narrowed);
  }
}

TYPED_TEST_P(DeviceAdamConformance, AdamReadsALateScaleAndNaNChangesNothing) {
  const auto weight = this->random_floats(1003, 8);
  const auto gradient = this->upload(this->raw(this->random_floats(1003, 11)));
  const auto run = [&](const kernels::UpdateScalars& scalars) {
    const auto there = this->upload(this->raw(weight));
    const auto exp_avg = this->upload(this->raw(std::vector<float>(1003)));
    const auto exp_avg_sq = this->upload(this->raw(std::vector<float>(1003)));
    this->device_->update_step({this->floats(*there), this->floats(*exp_avg),
                                this->floats(*exp_avg_sq), this->floats(*gradient)},
                               scalars, *this->stream_);
    return this->download_floats(*there);
  };
  const auto half = this->upload(this->raw(std::vector<float>{0.5F}));
  const auto nan = this->upload(this->raw(std::vector<float>{NAN}));
  EXPECT_EQ(run({.gradient_scale = 7.0F, .late_scale = this->floats(*half).data()}),
            run({.gradient_scale = 0.5F}));
  EXPECT_EQ(run({.late_scale = this->floats(*nan).data()}), weight);
}

// The device's own arithmetic over fp32 masters is the measure.
TYPED_TEST_P(DeviceAdamConformance, AdamWithARemainderGivesTheBitsOfFp32Masters) {
  for (const std::size_t count : kCounts) {
    for (const double lr : {0.0, 1e-3}) {  // without a change, halves stay halves
      auto masters = this->random_floats(count, 8);
      for (std::size_t i = 0; i < count; i += 3)
        masters[i] = i % 2 == 0 ? 1.01171875F : 1.00390625F;
      const auto exp_avg = this->random_floats(count, 9);
      auto exp_avg_sq = this->random_floats(count, 10);
      for (float& value : exp_avg_sq) value = std::abs(value);
      const auto gradient = this->upload(this->raw(this->random_floats(count, 11)));
      const kernels::UpdateScalars scalars{.lr = lr, .weight_decay = 0.1, .step = 3};

      const auto whole = this->upload(this->raw(masters));
      const auto whole16 = this->allocate(Bytes(2 * count));
      const auto split16 = this->allocate(Bytes(2 * count));
      const Numel numel(count);
      const auto rest = this->allocate(kernels::remainder_bytes(numel));
      this->device_->fill_zero(rest->bytes(), *this->stream_);
      const auto remainder = kernels::remainder_over(rest->bytes(), numel);
      this->device_->store_remainder(remainder, Numel(), whole->bytes().data(), DType::kFloat32,
                                     numel, *this->stream_);
      this->device_->cast(split16->bytes().data(), DType::kBFloat16, whole->bytes().data(),
                          DType::kFloat32, numel, *this->stream_);
      std::vector<std::vector<std::byte>> moments;
      for (const bool split : {false, true}) {
        const auto avg = this->upload(this->raw(exp_avg));
        const auto sq = this->upload(this->raw(exp_avg_sq));
        kernels::UpdateSpans spans;
        spans.exp_avg = this->floats(*avg);
        spans.exp_avg_sq = this->floats(*sq);
        spans.gradient = this->floats(*gradient);
        spans.weight16 = (split ? split16 : whole16)->bytes().data();
        if (split) {
          spans.remainder = remainder;
        } else {
          spans.weight = this->floats(*whole);
        }
        for (int step = 0; step < 2; ++step)
          this->device_->update_step(spans, scalars, *this->stream_);
        moments.push_back(this->download(avg->bytes()));
        moments.push_back(this->download(sq->bytes()));
      }
      EXPECT_EQ(moments[0], moments[2]) << count;
      EXPECT_EQ(moments[1], moments[3]) << count;
      EXPECT_EQ(this->download(split16->bytes()), this->download(whole16->bytes())) << count;
      auto rest_got = this->download(rest->bytes());
      const auto weights_got = this->download(split16->bytes());
      std::vector<float> joined(count);
      kernels::join_masters(joined, weights_got.data(), kernels::remainder_over(rest_got, numel));
      EXPECT_EQ(joined, this->download_floats(*whole)) << count;
      const std::size_t first = std::min<std::size_t>(5, count);
      this->device_->join_masters(this->floats(*whole).subspan(first), split16->bytes().data(),
                                  remainder, Numel(first), *this->stream_);
      EXPECT_EQ(this->download_floats(*whole), joined) << count << " by the device";
    }
  }
}

// The device's own arithmetic over fp32 masters is the measure, again.
TYPED_TEST_P(DeviceAdamConformance, AdamOverRoundedWeightsGivesTheBitsOfMastersThatAreRounded) {
  const auto rounded = [](std::vector<float> values) {
    for (float& value : values) value = kernels::to_float(kernels::bfloat16_from(value));
    return values;
  };
  const auto narrow = [](const std::vector<float>& values) {
    std::vector<std::uint16_t> bits;
    for (const float value : values) bits.push_back(kernels::bfloat16_from(value).bits);
    const auto bytes = std::as_bytes(std::span(bits));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  const auto plain = [this](const std::vector<float>& values) {
    const auto bytes = this->raw(values);
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  for (const std::size_t count : kCounts) {
    for (const bool narrow_moments : {false, true}) {
      const auto masters = rounded(this->random_floats(count, 8));
      auto exp_avg = this->random_floats(count, 9);
      auto exp_avg_sq = this->random_floats(count, 10);
      for (float& value : exp_avg_sq) value = std::abs(value);
      if (narrow_moments) {
        exp_avg = rounded(exp_avg);
        exp_avg_sq = rounded(exp_avg_sq);
      }
      const auto gradient = this->upload(this->raw(this->random_floats(count, 11)));
      const kernels::UpdateScalars scalars{.weight_decay = 0.1, .step = 3};

      const auto whole = this->upload(this->raw(masters));
      const auto whole16 = this->allocate(Bytes(2 * count));
      const auto whole_avg = this->upload(this->raw(exp_avg));
      const auto whole_sq = this->upload(this->raw(exp_avg_sq));
      this->device_->update_step(
          {this->floats(*whole), this->floats(*whole_avg), this->floats(*whole_sq),
           this->floats(*gradient), whole16->bytes().data(), DType::kBFloat16},
          scalars, *this->stream_);

      const auto weight16 = this->upload(narrow(masters));
      const auto avg = this->upload(narrow_moments ? narrow(exp_avg) : plain(exp_avg));
      const auto sq = this->upload(narrow_moments ? narrow(exp_avg_sq) : plain(exp_avg_sq));
      kernels::UpdateSpans spans;
      spans.gradient = this->floats(*gradient);
      spans.weight16 = weight16->bytes().data();
      spans.rounds_weight16 = true;
      if (narrow_moments) {
        spans.moments16 = {avg->bytes().data(), sq->bytes().data()};
      } else {
        spans.exp_avg = this->floats(*avg);
        spans.exp_avg_sq = this->floats(*sq);
      }
      this->device_->update_step(spans, scalars, *this->stream_);

      EXPECT_EQ(this->download(weight16->bytes()), this->download(whole16->bytes())) << count;
      const auto expected_avg = this->download_floats(*whole_avg);
      const auto expected_sq = this->download_floats(*whole_sq);
      EXPECT_EQ(this->download(avg->bytes()),
                narrow_moments ? narrow(expected_avg) : plain(expected_avg));
      EXPECT_EQ(this->download(sq->bytes()),
                narrow_moments ? narrow(expected_sq) : plain(expected_sq));
    }
  }
}

TYPED_TEST_P(DeviceAdamConformance, MastersTakeWeightsThatWereWritten) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    for (const std::size_t count : kCounts) {
      const auto masters = this->random_floats(count, 8);
      auto values = masters;
      for (std::size_t i = 0; i < count; i += 3) values[i] = 0.37F * static_cast<float>(i);
      std::vector<std::byte> weights(bytes_of(Numel(count), dtype).size());
      kernels::cast_reference(weights.data(), dtype, this->raw(values).data(), DType::kFloat32,
                              Numel(count));
      auto expected = masters;
      kernels::adopt_written_reference(expected, weights.data(), dtype);
      const auto masters_there = this->upload(this->raw(masters));
      const auto weights_there = this->upload(weights);
      this->device_->adopt_written(this->floats(*masters_there), weights_there->bytes().data(),
                                   dtype, *this->stream_);
      EXPECT_EQ(this->download_floats(*masters_there), expected) << name_of(dtype) << " " << count;
    }
  }
}

REGISTER_TYPED_TEST_SUITE_P(DeviceAdamConformance, StatesOf8BitsAreTheHosts,
                            AdamGivesTheBitsOfTheReference, AdamGivesTheBitsOfTheHostForAnyBits,
                            AdamReadsALateScaleAndNaNChangesNothing,
                            AdamWithARemainderGivesTheBitsOfFp32Masters,
                            AdamOverRoundedWeightsGivesTheBitsOfMastersThatAreRounded,
                            MastersTakeWeightsThatWereWritten);

}  // namespace strata::device
