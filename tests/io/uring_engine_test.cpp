// The engine over a ring that the test has in hand; uring_kernel_test.cpp has the kernel's.
#include "strata/io/uring_engine.h"

#include "io/direct_transfers.h"
#include "io/faulty_calls.h"
#include "io/io_engine_conformance.h"
#include "io/simulated_ring.h"

namespace strata::testing {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<io::IoEngine> simulated(const io::EngineOptions& options, unsigned seed,
                                        std::shared_ptr<io::SystemCalls> calls,
                                        std::shared_ptr<RingWatch> watch = {}) {
  if (watch == nullptr) watch = std::make_shared<RingWatch>();
  return io::make_uring_engine(options, [&](int depth) {
    return std::make_unique<SimulatedRing>(depth, seed, std::move(calls), std::move(watch));
  });
}

struct SimulatedUring {
  static constexpr Bytes kPiece = 1000_B;
  static std::unique_ptr<io::IoEngine> make() {
    return simulated({.piece = kPiece, .depth = 5, .queue_max = 3}, 7,
                     std::make_shared<io::SystemCalls>());
  }
};

struct OneAtATimeUring {
  static constexpr Bytes kPiece = 64_KiB;
  static std::unique_ptr<io::IoEngine> make() {
    return simulated({.piece = kPiece, .depth = 1, .queue_max = 1}, 8,
                     std::make_shared<io::SystemCalls>());
  }
};

// Short transfers, EINTR and EAGAIN: the engine must hide them from its caller.
struct FaultyUring {
  static constexpr Bytes kPiece = 300_B;
  static std::unique_ptr<io::IoEngine> make() {
    return simulated({.piece = kPiece, .depth = 8, .queue_max = 4}, 9,
                     std::make_shared<FaultyCalls>(20260801U));
  }
};

struct DirectFaultyUring {
  static constexpr Bytes kPiece = 8_KiB;
  static std::unique_ptr<io::IoEngine> make() {
    return std::make_unique<DirectTransfers>(simulated(
        {.piece = kPiece, .depth = 4, .queue_max = 4}, 10, std::make_shared<FaultyCalls>(5U)));
  }
};

using Rings = ::testing::Types<SimulatedUring, OneAtATimeUring, FaultyUring, DirectFaultyUring>;
INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, IoEngineConformance, Rings);

class UringEngine : public ::testing::Test {
 protected:
  std::unique_ptr<io::IoEngine> make(int depth, unsigned seed = 1) {
    return simulated({.piece = 100_B, .depth = depth, .queue_max = 64}, seed, calls_, watch_);
  }
  // A file of that many bytes.
  io::File data(std::size_t bytes) {
    folder_.write("data", std::string(bytes, 'x'));
    return {folder_ / "data", io::File::Mode::kReadWrite};
  }

  TemporaryFolder folder_;
  std::shared_ptr<FaultyCalls> calls_ = std::make_shared<FaultyCalls>(11U);
  std::shared_ptr<RingWatch> watch_ = std::make_shared<RingWatch>();
};

TEST_F(UringEngine, ReportsWhereAWriteMetAFullDisk) {
  calls_->fail_at(Bytes(750), -ENOSPC);
  io::File file(folder_ / "data", io::File::Mode::kCreate);
  const auto source = patterned_bytes(1000, 1);
  const auto transfer = make(3)->write(file, Bytes(50), source);
  const std::string message = message_of<IoError>([&] { transfer->wait(); });
  EXPECT_THAT(message, HasSubstr("path=" + file.path() + " offset=50 wanted=1000 got=700"));
  EXPECT_THAT(message, HasSubstr("errno=28 (No space left on device)"));
}

TEST_F(UringEngine, ReportsTheFailureAtTheLowestOffsetWhicheverEndsFirst) {
  for (const int at : {910, 330, 120}) calls_->fail_at(Bytes(at), -EIO);
  const io::File file = data(1000);
  for (unsigned seed = 0; seed < 200; ++seed) {
    const auto engine = make(4, seed);
    std::vector<std::byte> target(1000);
    const auto transfer = engine->read(file, Bytes(0), target);
    ASSERT_THAT(message_of<IoError>([&] { transfer->wait(); }), HasSubstr("got=120 errno=5"));
  }
}

TEST_F(UringEngine, AWriteThatMovesNothingFailsInsteadOfSpinning) {
  calls_->fail_at(Bytes(5), 0);
  io::File file(folder_ / "data", io::File::Mode::kCreate);
  const auto source = patterned_bytes(10, 1);
  const auto transfer = make(1)->write(file, Bytes(0), source);
  EXPECT_THAT(message_of<IoError>([&] { transfer->wait(); }), HasSubstr("got=5"));
}

TEST_F(UringEngine, WhatIsToldToComeAgainForEverFails) {
  calls_->fail_at(Bytes(5), -EAGAIN);
  const io::File file = data(10);
  std::vector<std::byte> target(10);
  const auto transfer = make(1)->read(file, Bytes(0), target);
  EXPECT_THAT(message_of<IoError>([&] { transfer->wait(); }), HasSubstr("got=5 errno=11"));
}

TEST_F(UringEngine, EverySeedOfFaultsAndOrdersGivesTheSameBytes) {
  const auto source = patterned_bytes(2345, 4);
  for (unsigned seed = 0; seed < 300; ++seed) {
    const auto engine = simulated({.piece = 500_B, .depth = 1 + static_cast<int>(seed % 7)}, seed,
                                  std::make_shared<FaultyCalls>(seed));
    io::File file(folder_ / "data", io::File::Mode::kCreate);
    const Bytes at(static_cast<int>(seed));
    const auto head = engine->write(file, at, std::span(source).first(1111));
    const auto tail = engine->write(file, at + 1111_B, std::span(source).subspan(1111));
    head->wait();
    tail->wait();
    std::vector<std::byte> target(source.size());
    engine->read(file, at, target)->wait();
    ASSERT_EQ(target, source) << "seed " << seed;
  }
}

TEST_F(UringEngine, EverySeedOfRefusedDirectTransfersGivesTheSameBytes) {
  const auto source = patterned_bytes((40_KiB).size(), 4);
  io::File file(folder_ / "data", io::File::Mode::kCreate);
  io::write_fully(file, 0_B, source);
  for (unsigned seed = 0; seed < 100; ++seed) {
    const auto calls = std::make_shared<FaultyCalls>(seed);
    if (seed % 2 == 0) calls->fail_direct(-EINVAL);
    DirectTransfers engine(simulated({.piece = 8_KiB, .depth = 3}, seed, calls));
    std::vector<std::byte> target(source.size() - 4097);
    engine.read(file, Bytes(4097), target)->wait();
    ASSERT_TRUE(std::ranges::equal(target, std::span(source).subspan(4097))) << "seed " << seed;
  }
}

TEST_F(UringEngine, KeepsTheQueueFullWithPiecesOfManyTransfers) {
  watch_->hold(true);
  const auto engine = make(6);
  const io::File file = data(1000);
  std::vector<std::vector<std::byte>> targets(10, std::vector<std::byte>(100));
  std::vector<std::unique_ptr<io::Transfer>> transfers;
  for (int i = 0; i < 10; ++i)
    transfers.push_back(engine->read(file, Bytes(i * 100), targets[static_cast<std::size_t>(i)]));
  watch_->wait_for_depth(6);
  for (const auto& transfer : transfers) EXPECT_FALSE(transfer->done());
  watch_->hold(false);
  for (const auto& transfer : transfers) EXPECT_NO_THROW(transfer->wait());
  EXPECT_EQ(watch_->deepest(), 6U);
}

TEST_F(UringEngine, ACallerWaitsWhileTheQueueIsFull) {
  watch_->hold(true);
  const auto engine = simulated({.piece = 100_B, .depth = 1, .queue_max = 1}, 3, calls_, watch_);
  const io::File file = data(300);
  std::vector<std::byte> target(300);
  const auto first = engine->read(file, Bytes(0), std::span(target).first(100));
  watch_->wait_for_depth(1);
  const auto second = engine->read(file, Bytes(100), std::span(target).subspan(100, 100));
  std::unique_ptr<io::Transfer> third;
  std::thread caller(
      [&] { third = engine->read(file, Bytes(200), std::span(target).subspan(200, 100)); });
  EXPECT_FALSE(second->done());
  watch_->hold(false);
  caller.join();
  EXPECT_NO_THROW(third->wait());
  EXPECT_EQ(target, std::vector<std::byte>(300, std::byte{'x'}));
}

TEST_F(UringEngine, UsesRegisteredMemoryByItsNumberWhilePiecesLieInIt) {
  calls_->set_benign(false);
  const auto engine = make(1);
  const io::File file = data(1000);
  std::vector<std::byte> target(1000);
  {
    const auto registration = engine->register_memory(std::span(target).subspan(50, 500));
    EXPECT_EQ(registration->refused(), "");
    EXPECT_THAT(engine->register_memory(std::span(target).subspan(549, 10))->refused(),
                HasSubstr("registered already"));
    EXPECT_EQ(engine->register_memory(std::span(target).subspan(550, 10))->refused(), "");
    engine->read(file, Bytes(0), target)->wait();  // pieces of 100 from 100 to 500 lie in it
    EXPECT_EQ(watch_->requests_in_regions(), 4);
  }
  engine->read(file, Bytes(0), target)->wait();
  EXPECT_EQ(watch_->requests_in_regions(), 4);
}

TEST_F(UringEngine, SaysWhyMemoryIsNotRegistered) {
  const auto engine = make(1);
  std::vector<std::byte> memory(100);
  watch_->refuse_regions(ENOMEM);
  EXPECT_THAT(engine->register_memory(memory)->refused(), HasSubstr("raise it (ulimit -l)"));
  watch_->refuse_regions(EOPNOTSUPP);
  EXPECT_THAT(engine->register_memory(memory)->refused(), HasSubstr("Operation not supported"));
  watch_->refuse_regions(0);
  const auto one = engine->register_memory(std::span(memory).first(10));
  const auto two = engine->register_memory(std::span(memory).subspan(10, 10));
  EXPECT_THAT(engine->register_memory(std::span(memory).subspan(20, 10))->refused(),
              HasSubstr("errno=28"));
}

TEST_F(UringEngine, WhenTheRingBreaksEveryTransferFailsAndNobodyHangs) {
  const io::File file = data(1000);
  for (int requests = 0; requests < 40; ++requests) {
    watch_->break_after(requests);
    const auto engine = simulated({.piece = 100_B, .depth = 3, .queue_max = 2},
                                  static_cast<unsigned>(requests), calls_, watch_);
    std::vector<std::vector<std::byte>> targets(6, std::vector<std::byte>(1000));
    std::vector<std::unique_ptr<io::Transfer>> transfers;
    for (auto& target : targets) transfers.push_back(engine->read(file, Bytes(0), target));
    const auto registration = engine->register_memory(targets[0]);
    EXPECT_THAT(message_of<IoError>([&] { transfers.back()->wait(); }), HasSubstr("broke"));
    for (const auto& transfer : transfers) {
      const std::string message = message_of<IoError>([&] { transfer->wait(); });
      EXPECT_TRUE(message == "the ring broke" || message == "no exception") << message;
    }
    EXPECT_THROW(engine->read(file, Bytes(0), targets[0])->wait(), IoError);
    EXPECT_THAT(engine->register_memory(targets[1])->refused(), HasSubstr("no longer serves"));
  }
}

TEST_F(UringEngine, WhenTheRingBreaksMemoryStaysTheSystemsUntilItLetsGo) {
  calls_->set_benign(false);
  const io::File file = data(1000);
  watch_->break_after(2);
  watch_->be_late(true);
  const auto engine = make(3);
  std::vector<std::byte> target(1000);
  const auto transfer = engine->read(file, Bytes(0), target);
  watch_->wait_for_withdrawal();
  EXPECT_FALSE(transfer->done());
  watch_->be_late(false);
  EXPECT_THAT(message_of<IoError>([&] { transfer->wait(); }), HasSubstr("the ring broke"));
  const std::vector<std::byte> left = target;
  target.assign(target.size(), std::byte{'y'});  // the caller's again
  EXPECT_THROW(engine->read(file, Bytes(0), target)->wait(), IoError);
  EXPECT_EQ(target, std::vector<std::byte>(1000, std::byte{'y'}));
  EXPECT_EQ(std::ranges::count(left, std::byte{'x'}), 500);  // two that ended, three that were late
}

TEST_F(UringEngine, RefusesOptionsThatCannotWork) {
  EXPECT_THAT(message_of<UsageError>([] { io::make_uring_engine({.depth = 0}); }),
              HasSubstr("depth=0"));
  EXPECT_THROW(io::make_uring_engine({.depth = 100'000}), UsageError);
  EXPECT_THROW(io::make_uring_engine({.piece = 0_B}), UsageError);
  EXPECT_THROW(io::make_uring_engine({.piece = 4_GiB}), UsageError);
  EXPECT_THROW(io::make_uring_engine({.queue_max = 0}), UsageError);
}

}  // namespace
}  // namespace strata::testing
