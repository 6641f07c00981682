// An optimizer's step on states that lie on a drive, in parts, beside the same step on whole
// blocks: how the engine is to use the seam, and that it gives the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <random>
#include <string>
#include <vector>

#include "offload/store_harness.h"
#include "strata/kernels/update.h"

namespace strata::offload {
namespace {

constexpr std::int64_t kNumel = 300000;

struct Model {
  std::vector<float> gradient;
  std::vector<std::uint16_t> weight;
};

// States of one unit: the masters' remainder in two blocks, low halves and flags, and two moments.
class Unit {
 public:
  explicit Unit(StateStore& store) : store_(store) {
    const std::vector<std::string> names{"low", "halves_up", "exp_avg", "exp_avg_sq"};
    for (std::size_t i = 0; i < names.size(); ++i) {
      blocks_.push_back(
          store.add("unit." + names[i], bytes_of_elements(i, kNumel),
                    i < 2 ? memory::Kind::kMasterWeights : memory::Kind::kOptimizerState));
    }
  }

  void step(device::Device& device, Model& model, std::int64_t step) {
    const std::int64_t most = elements_at_once(kBits, store_.lease_budget(0)).value;
    for (std::int64_t begin = 0; begin < kNumel; begin += most)
      step_on(device, model, step, begin, std::min(begin + most, kNumel));
    store_.advance();
  }

  std::vector<std::byte> content(std::size_t block) {
    std::vector<std::byte> all;
    const Bytes size = store_.size_of(blocks_[block]);
    for (Bytes begin; begin < size; begin += 64_KiB) {
      const auto lease =
          store_.fetch(Part{blocks_[block], begin, std::min(begin + 64_KiB, size)}, Access::kRead);
      all.insert(all.end(), lease->bytes().begin(), lease->bytes().end());
    }
    return all;
  }
  static constexpr std::size_t kBlocks = 4;

 private:
  static constexpr std::array kBits{16, 1, 32, 32};
  static Bytes bytes_of_elements(std::size_t block, std::int64_t numel) {
    return Bytes((numel * kBits[block] + 7) / 8);
  }

  void step_on(device::Device& device, Model& model, std::int64_t step, std::int64_t begin,
               std::int64_t end) {
    std::vector<Part> parts;
    for (std::size_t i = 0; i < blocks_.size(); ++i)
      parts.push_back({blocks_[i], bytes_of_elements(i, begin), bytes_of_elements(i, end)});
    const auto leases = store_.fetch_all(parts, Access::kReadWrite);
    const auto numel = static_cast<std::size_t>(end - begin);
    const auto floats = [&](std::size_t i) {
      return std::span(reinterpret_cast<float*>(leases[i]->bytes().data()), numel);
    };
    kernels::UpdateSpans spans;
    spans.remainder = {reinterpret_cast<std::uint16_t*>(leases[0]->bytes().data()),
                       reinterpret_cast<std::uint8_t*>(leases[1]->bytes().data())};
    spans.exp_avg = floats(2);
    spans.exp_avg_sq = floats(3);
    spans.gradient = std::span(model.gradient).subspan(static_cast<std::size_t>(begin), numel);
    spans.weight16 = reinterpret_cast<std::byte*>(model.weight.data() + begin);
    spans.weight16_dtype = DType::kBFloat16;
    kernels::UpdateScalars scalars;
    scalars.lr = 1e-2;
    scalars.step = step;
    device.update_step(spans, scalars, device.compute_stream());
  }

  StateStore& store_;
  std::vector<BlockId> blocks_;
};

Model random_model() {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  Model model{std::vector<float>(kNumel), std::vector<std::uint16_t>(kNumel)};
  std::ranges::generate(model.gradient, [&] { return normal(random); });
  std::ranges::generate(model.weight, [&] {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16U);
  });
  return model;
}

TEST(AdamParts, GiveTheBitsOfTheWholeFromAMegabyteOfMemory) {
  device::CpuDevice device;
  const testing::TemporaryFolder folder;
  const auto memory = make_memory_store(memory::Tier::kHost, device);
  const auto made_drive =
      make_nvme_store(device, {.arena = std::make_shared<StagingArena>(device, 1_MiB),
                               .file = file_below(std::make_shared<io::ThreadEngine>(), folder),
                               .verify = true});
  StateStore& drive = *made_drive;
  Model whole = random_model();
  Model in_parts = whole;
  Unit at_rest(*memory);
  Unit on_drive(drive);
  for (int step = 1; step <= 3; ++step) {
    at_rest.step(device, whole, step);
    on_drive.step(device, in_parts, step);
    ASSERT_EQ(whole.weight, in_parts.weight) << step;
  }
  for (std::size_t i = 0; i < Unit::kBlocks; ++i)
    EXPECT_EQ(at_rest.content(i), on_drive.content(i)) << i;
  EXPECT_GT(drive.counts().reads, 0);
}

}  // namespace
}  // namespace strata::offload
