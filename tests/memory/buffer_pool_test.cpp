#include "strata/memory/buffer_pool.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"
#include "strata/memory/ledger.h"

namespace strata::memory {
namespace {

using Pool = BufferPool<HostBuffer>;

Pool::Allocate charged_to(std::shared_ptr<Ledger> ledger) {
  return [ledger](Bytes bytes) {
    return std::make_unique<HostBuffer>(
        bytes, HostBufferOptions{.ledger = ledger, .kind = Kind::kGathered});
  };
}

TEST(BufferPool, AllocatesNothingOnceEverySizeWasSeen) {
  const auto ledger = std::make_shared<Ledger>();
  Pool pool(charged_to(ledger));
  const auto step = [&pool] {
    auto current = pool.acquire(100_KiB);
    for (int block = 0; block < 10; ++block) {
      auto next = pool.acquire(50_KiB);
      current = std::move(next);
    }
  };
  step();
  const auto warm = ledger->charges(Tier::kHost);
  EXPECT_EQ(warm, 3);  // the large one, and two small ones in turn
  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(ledger->charges(Tier::kHost), warm);
  EXPECT_EQ(pool.leased_bytes(), 0_B);
  EXPECT_EQ(pool.cached_bytes(), ledger->held(Tier::kHost, Kind::kGathered));
}

TEST(BufferPool, GivesTheBufferThatIsPreferredIfItIsThere) {
  Pool pool(charged_to(std::make_shared<Ledger>()));
  const Bytes page = page_size();
  auto first = pool.acquire(page);
  auto second = pool.acquire(page);
  const HostBuffer* const wanted = first.get();
  first.reset();
  second.reset();
  EXPECT_NE(pool.acquire(page * 2, wanted).get(), wanted) << "another size";
  auto found = pool.acquire(page, wanted);
  EXPECT_EQ(found.get(), wanted);
  EXPECT_NE(pool.acquire(page, wanted).get(), wanted) << "in use";
}

TEST(BufferPool, ABufferThatIsTakenOutIsItsTakersAndThePoolHasAsManyAsBefore) {
  const auto ledger = std::make_shared<Ledger>();
  Pool pool(charged_to(ledger));
  const Bytes page = page_size();
  auto lease = pool.acquire(page);
  std::byte* const before = lease->bytes().data();
  std::unique_ptr<HostBuffer> taken = pool.replace(lease);
  EXPECT_EQ(taken->bytes().data(), before);
  EXPECT_NE(lease->bytes().data(), before);
  EXPECT_EQ(Bytes(lease->bytes().size()), page);
  EXPECT_EQ(pool.leased_bytes(), page);
  lease.reset();
  EXPECT_EQ(pool.cached_bytes(), page);
  EXPECT_EQ(ledger->held(Tier::kHost, Kind::kGathered), page * 2);
  taken.reset();
  EXPECT_EQ(ledger->held(Tier::kHost, Kind::kGathered), page);
}

TEST(BufferPool, CachedAndUsedBuffersStayWithinTheTotalLimitTogether) {
  const auto ledger = std::make_shared<Ledger>();
  Pool pool(charged_to(ledger));
  const Bytes page = page_size();
  pool.set_total_limit(page * 4);
  for (int i = 0; i < 3; ++i) {
    auto first = pool.acquire(page);
    auto second = pool.acquire(page);
    auto third = pool.acquire(page * 2);
    EXPECT_EQ(pool.leased_bytes(), page * 4);
  }
  EXPECT_EQ(ledger->charges(Tier::kHost), 3) << "what fits is kept";
  {
    const auto other = pool.acquire(page * 3);  // the cached ones make room for another size
    EXPECT_LE(pool.leased_bytes() + pool.cached_bytes(), page * 4);
  }
  EXPECT_EQ(ledger->peak(Tier::kHost, Kind::kGathered), page * 4);
  {
    const auto large = pool.acquire(page * 5);  // more than the limit, but in use
    const auto small = pool.acquire(page);
    EXPECT_EQ(pool.cached_bytes(), 0_B);
  }
  EXPECT_LE(pool.cached_bytes(), page * 4);
}

TEST(BufferPool, ALeaseHasExactlyTheBytesAskedFor) {
  Pool pool(charged_to(nullptr));
  EXPECT_EQ(pool.acquire(5000_B)->bytes().size(), 5000U);
  EXPECT_EQ(pool.acquire(5008_B)->bytes().size(), 5008U);
  EXPECT_EQ(pool.cached_bytes(), 10008_B);
}

TEST(BufferPool, LeasesOfOneSizeNeverShareABuffer) {
  Pool pool(charged_to(nullptr));
  const auto first = pool.acquire(4_KiB);
  const auto second = pool.acquire(4_KiB);
  EXPECT_NE(first->bytes().data(), second->bytes().data());
}

TEST(BufferPool, FreesTheOldestBeyondItsLimit) {
  const auto ledger = std::make_shared<Ledger>();
  const Bytes page = page_size();
  Pool pool(charged_to(ledger));
  pool.set_total_limit(page * 3);
  { const auto oldest = pool.acquire(page * 2); }
  { const auto newest = pool.acquire(page * 3); }
  EXPECT_EQ(pool.cached_bytes(), page * 3);
  EXPECT_EQ(ledger->held(Tier::kHost), page * 3);
  { const auto again = pool.acquire(page * 3); }
  EXPECT_EQ(ledger->charges(Tier::kHost), 2);
  { const auto larger_than_the_limit = pool.acquire(page * 4); }
  EXPECT_EQ(pool.cached_bytes(), 0_B);
  EXPECT_EQ(ledger->held(Tier::kHost), 0_B);
}

TEST(BufferPool, TrimAndALowerLimitFreeWhatIsCachedAndNothingInUse) {
  const auto ledger = std::make_shared<Ledger>();
  const Bytes page = page_size();
  Pool pool(charged_to(ledger));
  const auto used = pool.acquire(page);
  { const auto cached = pool.acquire(page * 2); }
  pool.trim();
  EXPECT_EQ(ledger->held(Tier::kHost), page);
  EXPECT_EQ(pool.leased_bytes(), page);
  { const auto cached = pool.acquire(page * 2); }
  pool.set_total_limit(page * 2);
  EXPECT_EQ(pool.cached_bytes(), 0_B);
  EXPECT_EQ(ledger->held(Tier::kHost), page);
}

TEST(BufferPool, GivesUpCachedBuffersBeforeItRunsOutOfMemory) {
  const Bytes page = page_size();
  const auto ledger = std::make_shared<Ledger>();
  Pool pool([&](Bytes bytes) {
    if (ledger->held(Tier::kHost) + bytes > page * 4) throw OutOfMemoryError("full");
    return charged_to(ledger)(bytes);
  });
  { const auto first = pool.acquire(page * 3); }
  const auto second = pool.acquire(page * 4);
  EXPECT_EQ(pool.leased_bytes(), page * 4);
  EXPECT_THROW(pool.acquire(page), OutOfMemoryError);
  EXPECT_EQ(pool.leased_bytes(), page * 4);
}

TEST(BufferPool, AFailedAllocationLeavesThePoolAsItWas) {
  bool fail = true;
  Pool pool([&](Bytes bytes) {
    if (fail) throw std::runtime_error("device lost");
    return std::make_unique<HostBuffer>(bytes);
  });
  EXPECT_THROW(pool.acquire(4_KiB), std::runtime_error);
  EXPECT_EQ(pool.cached_bytes(), 0_B);
  EXPECT_EQ(pool.leased_bytes(), 0_B);
  fail = false;
  EXPECT_NO_THROW(pool.acquire(4_KiB));
}

TEST(BufferPool, ANewBufferThatCannotBeMadeLeavesTheFreeOnesAlone) {
  bool full = false;
  Pool pool([&](Bytes bytes) {
    if (full) throw OutOfMemoryError("full");
    return std::make_unique<HostBuffer>(bytes);
  });
  { const auto lease = pool.acquire(4_KiB); }
  full = true;
  EXPECT_TRUE(pool.has_cached(4_KiB));
  EXPECT_FALSE(pool.has_cached(100_KiB));
  EXPECT_THROW(pool.acquire_new(100_KiB), OutOfMemoryError);
  EXPECT_TRUE(pool.has_cached(4_KiB));
  full = false;
  EXPECT_EQ(Bytes(pool.acquire_new(100_KiB)->bytes().size()), 100_KiB);
}

}  // namespace
}  // namespace strata::memory
