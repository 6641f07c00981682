// Random users of a store on a drive, on drives that are late and fail.
#include <gmock/gmock.h>

#include "io/faulty_calls.h"
#include "offload/late_file.h"
#include "offload/random_workload.h"
#include "offload/store_harness.h"

namespace strata::offload {
namespace {

using testing::LateFile;
using testing::RandomWorkload;

struct Outcome {
  int errors = 0;
  int failed_writes = 0;
  std::string flush;  // the error of the last flush
  StoreCounts counts;
};

Outcome run_on_late_file(unsigned seed, int pages, unsigned failing, bool verify) {
  device::CpuDevice device;
  auto arena = std::make_shared<StagingArena>(device, kPartAlignment * pages);
  auto file = std::make_unique<LateFile>(seed, failing);
  const LateFile& seen = *file;
  Outcome outcome;
  {
    const auto made_store =
        make_nvme_store(device, {.arena = arena, .file = std::move(file), .verify = verify});
    StateStore& store = *made_store;
    RandomWorkload workload(store, seed, {.room = arena->budget(), .may_fail = failing > 0});
    workload.run();
    try {
      store.flush();
    } catch (const IoError& error) {
      outcome.flush = error.what();
    }
    outcome.errors = workload.errors();
    outcome.failed_writes = seen.failed_writes();
    outcome.counts = store.counts();
  }
  EXPECT_EQ(arena->in_use(), 0_B);
  EXPECT_EQ(device.ledger()->held(memory::Tier::kNvme), 0_B);
  EXPECT_EQ(device.ledger()->peak(memory::Tier::kHost, memory::Kind::kStaging), arena->budget());
  return outcome;
}

TEST(NvmeWorkload, LateTransfersGiveTheBytesThatWereWritten) {
  for (unsigned seed = 1; seed <= 200 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const int pages = 10 + static_cast<int>(seed % 40);
    const Outcome outcome = run_on_late_file(seed, pages, 0, seed % 2 == 0);
    EXPECT_EQ(outcome.flush, "");
    EXPECT_GT(outcome.counts.writes, 0);
  }
}

TEST(NvmeWorkload, TransfersThatFailAreToldAndNeverLendWrongBytes) {
  int failures = 0;
  for (unsigned seed = 1; seed <= 200 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const int pages = 10 + static_cast<int>(seed % 40);
    const Outcome outcome = run_on_late_file(seed, pages, 3 + seed % 30, seed % 2 == 0);
    if (outcome.failed_writes > 0) {
      EXPECT_THAT(outcome.flush, ::testing::HasSubstr("path=/drive/late"));
    }
    failures += outcome.errors;
  }
  EXPECT_GT(failures, 50);
}

// The store uses an engine whose system calls are short, are interrupted, or fail at one offset.
TEST(NvmeWorkload, SystemCallsThatMisbehaveAreToldAndNeverLendWrongBytes) {
  const testing::TemporaryFolder folder;
  device::CpuDevice device;
  int failures = 0;
  for (unsigned seed = 1; seed <= 24 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const auto calls = std::make_shared<testing::FaultyCalls>(seed);
    const auto io =
        std::make_shared<io::ThreadEngine>(io::EngineOptions{.piece = 16_KiB, .threads = 2}, calls);
    const bool fails = seed % 2 == 0;
    if (fails) calls->fail_at(4096_B * (1 + seed % 16), seed % 4 == 0 ? -EIO : -ENOSPC);
    auto arena = std::make_shared<StagingArena>(device, 80_KiB);
    const auto made_store =
        make_nvme_store(device, {.arena = arena, .file = file_below(io, folder)});
    StateStore& store = *made_store;
    RandomWorkload workload(store, seed,
                            {.room = arena->budget(), .operations = 40, .may_fail = fails});
    workload.run();
    failures += workload.errors();
  }
  EXPECT_GT(failures, 5);
}

// Kernels still work on parts whose leases were returned.
TEST(NvmeWorkload, WorkThatIsQueuedOnADeviceIsWritten) {
  for (unsigned seed = 1; seed <= 20 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    device::LateDevice device({}, seed);
    device::Stream& stream = device.compute_stream();
    auto arena = std::make_shared<StagingArena>(device, kPartAlignment * 5);
    const auto made_store =
        make_nvme_store(device, {.arena = arena, .file = std::make_unique<LateFile>(seed, 0)});
    StateStore& store = *made_store;
    std::vector<BlockId> blocks;
    for (int i = 0; i < 6; ++i)
      blocks.push_back(store.add("block", 8192_B, memory::Kind::kOptimizerState));
    for (int round = 0; round < 4; ++round) {
      for (const BlockId block : blocks) {
        const auto lease = store.fetch(block, Access::kReadWrite);
        auto* const values = reinterpret_cast<float*>(lease->bytes().data());
        device.enqueue(stream, [values] {
          for (int i = 0; i < 2048; ++i) values[i] += static_cast<float>(i);
        });
      }
    }
    for (const BlockId block : blocks) {
      const auto lease = store.fetch(block, Access::kRead);
      const auto* const values = reinterpret_cast<const float*>(lease->bytes().data());
      for (int i = 0; i < 2048; ++i) ASSERT_EQ(values[i], static_cast<float>(4 * i));
    }
  }
}

// The states' store and the weights' store work so: each leases its share while the other does,
// with any calls in between.
TEST(NvmeWorkload, TwoStoresLeaseTheirSharesOfOneArenaAtOnce) {
  device::CpuDevice device;
  const auto arena = std::make_shared<StagingArena>(device, 96_KiB);
  const auto store_on_late_drive = [&](std::uint64_t seed) {
    return make_nvme_store(
        device,
        NvmeStoreOptions{.arena = arena, .file = std::make_unique<testing::LateFile>(seed, 0)});
  };
  const auto states = store_on_late_drive(1);
  const auto weights = store_on_late_drive(2);
  std::vector<BlockId> of_states;
  std::vector<BlockId> of_weights;
  for (int i = 0; i < 12; ++i) {
    of_states.push_back(states->add("exp_avg", 16_KiB, memory::Kind::kOptimizerState));
    of_weights.push_back(weights->add("weights", 16_KiB, memory::Kind::kWeights));
  }
  EXPECT_EQ(states->lease_budget(of_states[0]), 16_KiB);
  std::mt19937 random(3);
  for (int value = 1; value < 30; ++value) {
    for (const BlockId block : of_states) {
      const std::array parts{Part{block, 0_B, 4_KiB}, Part{block, 4_KiB, 12_KiB},
                             Part{block, 12_KiB, 16_KiB}};  // three extents
      const auto leases = states->fetch_all(parts, Access::kReadWrite);
      const auto shard = weights->fetch(of_weights[random() % 12], Access::kReadWrite);
      for (const auto& lease : leases) {
        EXPECT_EQ(lease->bytes()[0], static_cast<std::byte>(value - 1));
        std::ranges::fill(lease->bytes(), static_cast<std::byte>(value));
      }
    }
  }
  EXPECT_EQ(device.ledger()->peak(memory::Tier::kHost, memory::Kind::kStaging), 96_KiB);
}

// Two stores share an arena: one uses the room that the other does not need.
TEST(NvmeWorkload, AStoreUsesTheRoomThatAnotherLeaves) {
  device::CpuDevice device;
  const auto arena = std::make_shared<StagingArena>(device, 96_KiB);
  const auto store = [&] {
    return make_nvme_store(device, NvmeStoreOptions{.arena = arena,
                                                    .file = std::make_unique<testing::LateFile>(
                                                        1, 0, /*prompt=*/true)});
  };
  const auto states = store();
  const auto weights = store();
  weights->fetch(weights->add("weights", 4_KiB, memory::Kind::kWeights), Access::kReadWrite);
  for (int i = 0; i < 5; ++i) states->add("exp_avg", 16_KiB, memory::Kind::kOptimizerState);
  for (int round = 0; round < 3; ++round) {
    for (BlockId block = 0; block < 5; ++block) states->fetch(block, Access::kReadWrite);
  }
  EXPECT_EQ(states->counts().reads, 0);
}

}  // namespace
}  // namespace strata::offload
