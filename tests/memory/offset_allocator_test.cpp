#include "strata/memory/offset_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "strata/base/error.h"

namespace strata::memory {
namespace {

// The same rules, found by looking at every granule: slow and plain.
class NaiveModel {
 public:
  NaiveModel(Bytes capacity, Bytes granule)
      : granule_(granule), used_(capacity.size() / granule.size()) {}

  std::optional<Bytes> try_allocate(Bytes size) {
    const std::size_t wanted = align_up(std::max(size, 1_B), granule_).size() / granule_.size();
    std::optional<std::pair<std::size_t, std::size_t>> best;  // (size of the free run, start)
    for (const auto& [begin, length] : free_runs()) {
      if (wanted > length) continue;
      if (!best || length < best->first) best = {length, begin};
    }
    if (!best) return std::nullopt;
    std::fill_n(used_.begin() + static_cast<std::ptrdiff_t>(best->second), wanted, true);
    sizes_[best->second] = wanted;
    return Bytes(best->second) * granule_.value;
  }

  void release(Bytes offset) {
    const std::size_t start = offset.size() / granule_.size();
    std::fill_n(used_.begin() + static_cast<std::ptrdiff_t>(start), sizes_.at(start), false);
    sizes_.erase(start);
  }

  Bytes in_use() const {
    return Bytes(static_cast<std::int64_t>(std::count(used_.begin(), used_.end(), true))) *
           granule_.value;
  }

 private:
  std::map<std::size_t, std::size_t> free_runs() const {
    std::map<std::size_t, std::size_t> runs;
    for (std::size_t at = 0; at < used_.size();) {
      const std::size_t begin = at;
      while (at < used_.size() && !used_[at]) ++at;
      if (at > begin) runs[begin] = at - begin;
      while (at < used_.size() && used_[at]) ++at;
    }
    return runs;
  }

  Bytes granule_;
  std::vector<bool> used_;
  std::map<std::size_t, std::size_t> sizes_;
};

// A random history, compared with the model after every step.
void compare_with_model(std::uint32_t seed, Bytes capacity, Bytes granule, Bytes largest) {
  std::mt19937 random(seed);
  OffsetAllocator allocator(capacity, granule);
  NaiveModel model(capacity, granule);
  std::vector<Bytes> held;
  for (int step = 0; step < 1000; ++step) {
    if (held.empty() || random() % 100 < 55) {
      const Bytes size(static_cast<std::int64_t>(random()) % (largest.value + 1));
      const auto got = allocator.try_allocate(size);
      ASSERT_EQ(got, model.try_allocate(size)) << "seed " << seed << " step " << step;
      if (got) held.push_back(*got);
    } else {
      std::swap(held[random() % held.size()], held.back());
      allocator.release(held.back());
      model.release(held.back());
      held.pop_back();
    }
    ASSERT_EQ(allocator.in_use(), model.in_use());
  }
  for (const Bytes offset : held) allocator.release(offset);
  EXPECT_EQ(allocator.in_use(), 0_B);
  EXPECT_EQ(allocator.try_allocate(allocator.capacity()), 0_B);  // in one piece
}

TEST(OffsetAllocator, BehavesAsThePlainModelOverRandomHistories) {
  for (std::uint32_t seed = 1; seed <= 8; ++seed) {
    compare_with_model(seed, 8_KiB, 16_B, 700_B);
    compare_with_model(seed, 601_B, 1_B, 40_B);
    compare_with_model(seed, 64_KiB, 256_B, 9_KiB);
  }
}

TEST(OffsetAllocator, FillsTheWholeCapacityAndThenRefuses) {
  OffsetAllocator allocator(1000_B, 256_B);
  EXPECT_EQ(allocator.capacity(), 768_B);
  EXPECT_EQ(allocator.try_allocate(257_B), 0_B);
  EXPECT_EQ(allocator.try_allocate(0_B), 512_B);
  EXPECT_EQ(allocator.try_allocate(1_B), std::nullopt);
  EXPECT_EQ(allocator.in_use(), 768_B);
}

TEST(OffsetAllocator, RefusesAbsurdSizesAndServesAnEmptySpace) {
  OffsetAllocator allocator(1_KiB, 256_B);
  EXPECT_EQ(allocator.try_allocate(Bytes(std::numeric_limits<std::int64_t>::max())), std::nullopt);
  EXPECT_EQ(allocator.in_use(), 0_B);
  OffsetAllocator empty(0_B, 256_B);
  EXPECT_EQ(empty.try_allocate(0_B), std::nullopt);
}

TEST(OffsetAllocator, ARangeThatIsNotHeldIsABug) {
  OffsetAllocator allocator(1_KiB, 256_B);
  const auto offset = allocator.try_allocate(256_B);
  ASSERT_TRUE(offset);
  EXPECT_THROW(allocator.release(512_B), InternalError);
  allocator.release(*offset);
  EXPECT_THROW(allocator.release(*offset), InternalError);
  EXPECT_EQ(allocator.try_allocate(1_KiB), 0_B);
}

}  // namespace
}  // namespace strata::memory
