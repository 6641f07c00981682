#include "strata/comm/inbox.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "comm/conformance_ranks.h"
#include "comm/late_ranks.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/device/cpu_device.h"

namespace strata::comm {
namespace {

using conformance::require_or_say;

std::vector<Bytes> bytes_list(std::initializer_list<std::int64_t> sizes) {
  std::vector<Bytes> result;
  for (const std::int64_t size : sizes) result.emplace_back(size);
  return result;
}

TEST(InboxRing, PutsContributionsOneBehindTheOtherAndBeginsAgain) {
  InboxRing ring(100_B);
  ring.expect(bytes_list({40, 40, 30, 20, 100}));
  const std::vector<std::int64_t> offsets = {0, 40, 0, 30, 0};
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    EXPECT_EQ(ring.offset(i).value, offsets[i]);
  }
}

TEST(InboxRing, RoomIsFreeWhenTheLastThatHadItHasBegun) {
  InboxRing ring(100_B);
  ring.expect(bytes_list({40, 40, 30, 20, 100}));
  EXPECT_EQ(ring.after(0), 0U);
  EXPECT_EQ(ring.after(1), 0U);
  EXPECT_EQ(ring.after(2), std::nullopt);  // where the first lies
  ring.begun(0, 7);
  EXPECT_EQ(ring.after(2), 7U);
  EXPECT_EQ(ring.after(3), std::nullopt);  // the end of the first, and of the second
  ring.begun(1, 8);
  EXPECT_EQ(ring.after(3), 8U);
  ring.begun(2, 9);
  EXPECT_EQ(ring.after(4), std::nullopt);
  ring.begun(3, 12);
  EXPECT_EQ(ring.after(4), 12U);
}

TEST(InboxRing, WhatIsExpectedNextComesBehindWhatHasBegunAndAfterIt) {
  InboxRing ring(100_B);
  ring.expect(bytes_list({40, 40, 10}));
  ring.begun(0, 1);
  ring.begun(1, 2);  // the third never does
  ring.expect(bytes_list({20, 30}));
  EXPECT_EQ(ring.offset(0), 80_B);
  EXPECT_EQ(ring.offset(1), 0_B);
  EXPECT_EQ(ring.after(0), 2U);
  EXPECT_EQ(ring.after(1), 2U);
}

// --- ranks as threads ---

constexpr std::size_t kPiece = 7;  // elements of a gradient

// The term of rank `rank` in element `i` of contribution `index` of a pass: a small whole number,
// so that sums are exact in every dtype. Some gradients are zero on every rank.
float value_of(int rank, int pass, std::size_t index, std::size_t i) {
  const std::size_t piece = i / kPiece;
  if ((piece + index + static_cast<std::size_t>(rank)) % 5 == 0) return 0.0F;
  return static_cast<float>(
      (static_cast<std::size_t>(rank) * 3 + index + piece + static_cast<std::size_t>(pass) + i) %
      17);
}

std::uint16_t bfloat16_of(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

// One rank's gradients of a pass, and their places.
class Pass {
 public:
  Pass(Collectives& c, device::Device& device, Inbox& inbox, int number, DType dtype,
       const std::vector<std::size_t>& slices)
      : c_(c), device_(device), inbox_(inbox), number_(number), dtype_(dtype), slices_(slices) {
    std::vector<Bytes> sizes;
    for (const std::size_t slice : slices) sizes.push_back(bytes_of(whole(slice), dtype));
    inbox.expect(sizes);
    for (std::size_t index = 0; index < slices.size(); ++index) {
      const std::size_t numel = whole(slices[index]).size();
      for (std::size_t begin = 0; begin < numel; begin += kPiece)
        waiting_.push_back({index, begin, std::min(begin + kPiece, numel)});
    }
    std::shuffle(waiting_.begin(), waiting_.end(),
                 std::mt19937(static_cast<unsigned>(c.rank() * 100 + number)));
    // Roughly in order, as a backward pass has it.
    std::ranges::stable_sort(waiting_, {}, [](const Gradient& g) { return g.index / 2; });
  }

  ~Pass() { c_.stream(Traffic::kContributions)->synchronize(); }

  void run() {
    for (std::size_t index = 0; index < slices_.size(); ++index) {
      std::vector<Gradient> later;
      for (const Gradient& gradient : waiting_) {
        if (inbox_.writable(gradient.index)) {
          write(gradient);
        } else {
          require_or_say(gradient.index > index, [] { return std::string("never writable"); });
          later.push_back(gradient);
        }
      }
      waiting_ = std::move(later);
      reduce(index);
    }
  }

 private:
  struct Gradient {
    std::size_t index;
    std::size_t begin;
    std::size_t end;
  };
  Numel whole(std::size_t slice) const {
    return Numel(static_cast<std::int64_t>(slice) * c_.world_size());
  }

  void write(const Gradient& g) {
    const Numel begin(static_cast<std::int64_t>(g.begin));
    const Numel numel(static_cast<std::int64_t>(g.end - g.begin));
    bool zero = true;
    std::vector<std::byte> bytes(bytes_of(numel, dtype_).size());
    for (std::size_t i = g.begin; i < g.end; ++i) {
      const float value = value_of(c_.rank(), number_, g.index, i);
      zero = zero && value == 0.0F;
      std::byte* const at = bytes.data() + (i - g.begin) * bytes.size() / (g.end - g.begin);
      if (dtype_ == DType::kFloat32) {
        std::memcpy(at, &value, sizeof(value));
      } else {
        const std::uint16_t narrow = bfloat16_of(value);
        std::memcpy(at, &narrow, sizeof(narrow));
      }
    }
    if (zero) {
      inbox_.write_zero(g.index, begin, numel, dtype_);
    } else {
      kept_.push_back(device_.allocate_uncharged(Bytes(bytes.size())));
      device_.copy(kept_.back()->bytes(), bytes, *c_.stream(Traffic::kContributions));
      inbox_.write(g.index, begin, kept_.back()->bytes(), dtype_);
    }
  }

  void reduce(std::size_t index) {
    std::vector<float> result(slices_[index], 1.0F);
    const auto host = std::as_writable_bytes(std::span(result));
    const auto there = device_.allocate_uncharged(Bytes(host.size()));
    device_.copy(there->bytes(), host, *c_.stream(Traffic::kContributions));
    Reduction reduction;
    reduction.dtype = dtype_;
    reduction.result = {reinterpret_cast<float*>(there->bytes().data()), result.size()};
    reduction.scale = 0.5F;
    reduction.accumulate = index % 2 == 1;
    inbox_.reduce(index, reduction, "unit")->wait();
    device_.copy(host, there->bytes(), device_.compute_stream());
    device_.compute_stream().synchronize();
    for (std::size_t i = 0; i < result.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(c_.rank()) * slices_[index] + i;
      float wanted = 0.0F;
      for (int r = 0; r < c_.world_size(); ++r) wanted += value_of(r, number_, index, at);
      wanted = 0.5F * wanted + (reduction.accumulate ? 1.0F : 0.0F);
      require_or_say(result[i] == wanted, [&] {
        return fmt::format("pass {}, contribution {}, element {}: {} instead of {}", number_, index,
                           at, result[i], wanted);
      });
    }
  }

  Collectives& c_;
  device::Device& device_;
  Inbox& inbox_;
  int number_;
  DType dtype_;
  const std::vector<std::size_t>& slices_;
  std::vector<Gradient> waiting_;
  std::vector<std::unique_ptr<device::Memory>> kept_;
};

class InboxOfPeers : public testing::TestWithParam<std::tuple<int, DType, bool>> {};

TEST_P(InboxOfPeers, AddsUpWhatEveryRankWrote) {
  const auto [world, dtype, late] = GetParam();
  std::vector<std::shared_ptr<device::Device>> devices;
  for (int r = 0; r < world; ++r) {
    if (late) {
      devices.push_back(conformance::late_device(r));
    } else {
      devices.push_back(std::make_shared<device::CpuDevice>());
    }
  }
  LocalGroup group(world, {});
  const auto results = conformance::run_as_threads(
      world,
      [&](int rank) {
        return make_peer_collectives(devices[static_cast<std::size_t>(rank)], group.rank(rank), {});
      },
      [&, type = dtype](Collectives& c) {
        EXPECT_TRUE(c.traits().has_inbox);
        const std::vector<std::size_t> slices = {40, 3, 64, 1, 17, 64, 8, 33};
        const Bytes most = bytes_of(Numel(64 * c.world_size()), type);
        const auto inbox = c.make_inbox("inbox", most * 2 - 1_B);
        for (int pass = 0; pass < 4; ++pass) {
          Pass(c, *devices[static_cast<std::size_t>(c.rank())], *inbox, pass, type, slices).run();
          c.barrier();
        }
        return std::string();
      });
  EXPECT_THAT(results, testing::Each(""));
}

INSTANTIATE_TEST_SUITE_P(Worlds, InboxOfPeers,
                         testing::Combine(testing::Values(1, 2, 3, 5),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Bool()));

TEST(InboxOfPeers, RanksThatReduceDifferentThingsAreTold) {
  LocalGroup group(2, {});
  const auto results = conformance::run_as_threads(
      2,
      [&](int rank) {
        return make_peer_collectives(std::make_shared<device::CpuDevice>(), group.rank(rank), {});
      },
      [](Collectives& c) {
        const auto inbox = c.make_inbox("inbox", 4096_B);
        const Bytes sizes[] = {64_B};
        inbox->expect(sizes);
        std::vector<float> result(8);
        Reduction reduction;
        reduction.result = result;
        try {
          inbox->reduce(0, reduction, c.rank() == 0 ? "first" : "second");
        } catch (const CommError& error) {
          return std::string(error.what());
        }
        return std::string("no error");
      });
  EXPECT_THAT(results, testing::Each(testing::AllOf(testing::HasSubstr("'first'"),
                                                    testing::HasSubstr("'second'"))));
}

}  // namespace
}  // namespace strata::comm
