// Conformance of implementations with Traits::one_sided: a gather needs no other rank's call.
#pragma once

#include <memory>

#include "comm/conformance_ranks.h"

namespace strata::comm::conformance {

class OneSidedGathers : public ConformanceTest {};

inline void gather_from_all(Collectives& c, const SharedBuffer& buffer, std::size_t bytes) {
  std::vector<std::byte> flat(bytes * static_cast<std::size_t>(c.world_size()));
  c.all_gather({&buffer, 0_B, 0_B, Bytes(bytes)}, flat, "thing")->wait();
  for (int r = 0; r < c.world_size(); ++r) {
    require_pattern(std::span(flat).subspan(static_cast<std::size_t>(r) * bytes, bytes), r,
                    "gather");
  }
}

TEST_P(OneSidedGathers, NeedNoOtherRank) {
  on_worlds([](Collectives& c) {
    require(c.traits().one_sided, "one-sided");
    auto a = c.allocate("a", 3000_B);
    auto b = c.allocate("b", 5000_B);
    fill(a->local(), c.rank());
    fill(b->local(), c.rank());
    c.barrier();
    // Each rank gathers another number of times and in another order; the last one not at all.
    for (int i = c.rank() + 1; i < c.world_size(); ++i) {
      gather_from_all(c, *(i % 2 == 0 ? a : b), 2500);
      gather_from_all(c, *a, 3000);
    }
    c.barrier();
  });
}

TEST_P(OneSidedGathers, WaitForABufferThatAPeerHasNotAllocatedYet) {
  on_ranks(2, [](Collectives& c) {
    auto early = c.allocate("early", 8_B);
    std::unique_ptr<SharedBuffer> late;
    if (c.rank() == 0) {
      late = c.allocate("late", 100_B);
      std::vector<std::byte> flat(200);
      c.all_gather({late.get(), 0_B, 0_B, 100_B}, flat, "late")->wait();
    } else {
      // Rank 0 is (about to be) waiting: many calls later the buffer appears.
      for (int i = 0; i < 1000; ++i) static_cast<void>(c.allocate("other", 8_B));
      late = c.allocate("late", 100_B);
    }
    c.barrier();
  });
}

TEST_P(OneSidedGathers, NameABufferThatAPeerNeverAllocates) {
  const auto errors = errors_on_ranks(
      2,
      [](Collectives& c) {
        std::unique_ptr<SharedBuffer> mine;
        if (c.rank() == 0) {
          mine = c.allocate("layers.7", 16_B);
          std::vector<std::byte> flat(32);
          c.all_gather({mine.get(), 0_B, 0_B, 16_B}, flat, "layers.7.weight")->wait();
        } else {
          for (;;) static_cast<void>(c.allocate("unused", 8_B));
        }
      },
      std::chrono::milliseconds(400));
  EXPECT_THAT(errors, testing::Each(testing::AllOf(testing::HasSubstr("rank 1"),
                                                   testing::HasSubstr("'layers.7'"),
                                                   testing::HasSubstr("layers.7.weight"))));
}

TEST_P(OneSidedGathers, NameARankWhoseBufferHasAnotherSize) {
  const auto errors = errors_on_ranks(2, [](Collectives& c) {
    auto buffer = c.allocate("layers.7", c.rank() == 0 ? 1000_B : 500_B);
    c.barrier();
    std::vector<std::byte> flat(2000);
    if (c.rank() == 0) c.all_gather({buffer.get(), 0_B, 0_B, 1000_B}, flat, "layers.7")->wait();
    c.barrier();
  });
  EXPECT_THAT(errors, testing::Each(testing::AllOf(testing::HasSubstr("rank 1"),
                                                   testing::HasSubstr("layers.7"),
                                                   testing::HasSubstr("500 B"))));
}

TEST_P(OneSidedGathers, ServeAReductionThatTheOwnerOfTheBufferWaitsFor) {
  on_ranks(2, [](Collectives& c) {
    auto source = c.allocate("source", 8_B);
    float result = 0;
    auto work = c.reduce_scatter(
        {source.get(), 0_B, DType::kFloat32, std::span(&result, 1), 1.0F, false}, "source");
    std::unique_ptr<SharedBuffer> late;
    if (c.rank() == 1) work->wait();  // needs rank 0, which waits for the buffer below
    late = c.allocate("late", 16_B);
    std::vector<std::byte> flat(32);
    c.all_gather({late.get(), 0_B, 0_B, 16_B}, flat, "late")->wait();
    work->wait();
    c.barrier();
  });
}

// The memory goes between two phases, and comes back with other values.
TEST_P(OneSidedGathers, ReadWhatABufferHoldsWhoseMemoryWasAway) {
  on_worlds([](Collectives& c) {
    const std::size_t bytes = 9000;
    auto buffer = c.allocate_growing("weights", Bytes(bytes));
    require(buffer->releasable(), "memory of these ranks can be given back");
    const std::byte* const place = buffer->local().data();
    for (int round = 0; round < 3; ++round) {
      buffer->back(Bytes(bytes));
      require(buffer->local().data() == place, "it has its place");
      fill(buffer->local(), c.rank() + round);
      c.barrier();
      std::vector<std::byte> flat(bytes * static_cast<std::size_t>(c.world_size()));
      c.all_gather({buffer.get(), 0_B, 0_B, Bytes(bytes)}, flat, "weights")->wait();
      for (int r = 0; r < c.world_size(); ++r) {
        require_pattern(std::span(flat).subspan(static_cast<std::size_t>(r) * bytes, bytes),
                        r + round, "gather");
      }
      c.barrier();
      buffer->release();
      c.barrier();
      c.unmap_freed();
      c.barrier();
    }
  });
}

}  // namespace strata::comm::conformance
