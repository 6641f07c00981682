#include "strata/io/thread_engine.h"

#include "io/faulty_calls.h"
#include "io/io_engine_conformance.h"

namespace strata::testing {
namespace {

using ::testing::HasSubstr;

struct PlainThreadEngine {
  static constexpr Bytes kPiece = 1000_B;
  static std::unique_ptr<io::IoEngine> make() {
    return std::make_unique<io::ThreadEngine>(
        io::EngineOptions{.piece = kPiece, .threads = 3, .queue_max = 4});
  }
};

struct OneThreadEngine {
  static constexpr Bytes kPiece = 64_KiB;
  static std::unique_ptr<io::IoEngine> make() {
    return std::make_unique<io::ThreadEngine>(
        io::EngineOptions{.piece = kPiece, .threads = 1, .queue_max = 1});
  }
};

// Short transfers and EINTR in three calls of four: the engine must hide them from its caller.
struct FaultyThreadEngine {
  static constexpr Bytes kPiece = 300_B;
  static std::unique_ptr<io::IoEngine> make() {
    return std::make_unique<io::ThreadEngine>(
        io::EngineOptions{.piece = kPiece, .threads = 3, .queue_max = 4},
        std::make_shared<FaultyCalls>(20260801U));
  }
};

using Engines = ::testing::Types<PlainThreadEngine, OneThreadEngine, FaultyThreadEngine>;
INSTANTIATE_TYPED_TEST_SUITE_P(Threads, IoEngineConformance, Engines);

class ThreadEngine : public ::testing::Test {
 protected:
  std::unique_ptr<io::ThreadEngine> make(int threads) {
    return std::make_unique<io::ThreadEngine>(
        io::EngineOptions{.piece = 100_B, .threads = threads, .queue_max = 8}, calls_);
  }

  TemporaryFolder folder_;
  std::shared_ptr<FaultyCalls> calls_ = std::make_shared<FaultyCalls>(11U);
};

TEST_F(ThreadEngine, ReportsWhereAWriteMetAFullDisk) {
  calls_->fail_at(Bytes(750), -ENOSPC);
  io::File file(folder_ / "data", io::File::Mode::kCreate);
  const auto source = patterned_bytes(1000, 1);
  const auto transfer = make(3)->write(file, Bytes(50), source);
  const std::string message = message_of<IoError>([&] { transfer->wait(); });
  EXPECT_THAT(message, HasSubstr("path=" + file.path() + " offset=50 wanted=1000 got=700"));
  EXPECT_THAT(message, HasSubstr("errno=28 (No space left on device)"));
}

TEST_F(ThreadEngine, ReportsAFailingDrive) {
  calls_->fail_at(Bytes(0), -EIO);
  folder_.write("data", std::string(10, 'x'));
  const io::File file(folder_ / "data", io::File::Mode::kRead);
  std::vector<std::byte> target(10);
  const auto transfer = make(1)->read(file, Bytes(0), target);
  EXPECT_THAT(message_of<IoError>([&] { transfer->wait(); }),
              HasSubstr("offset=0 wanted=10 got=0 errno=5 (Input/output error)"));
}

TEST_F(ThreadEngine, ReportsTheFailureAtTheLowestOffsetWhicheverThreadMeetsOneFirst) {
  for (const int at : {910, 330, 120}) calls_->fail_at(Bytes(at), -EIO);
  folder_.write("data", std::string(1000, 'x'));
  const io::File file(folder_ / "data", io::File::Mode::kRead);
  const auto engine = make(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::byte> target(1000);
    const auto transfer = engine->read(file, Bytes(0), target);
    ASSERT_THAT(message_of<IoError>([&] { transfer->wait(); }), HasSubstr("got=120 errno=5"));
  }
}

TEST_F(ThreadEngine, AWriteThatMovesNothingFailsInsteadOfSpinning) {
  calls_->fail_at(Bytes(5), 0);
  io::File file(folder_ / "data", io::File::Mode::kCreate);
  const auto source = patterned_bytes(10, 1);
  const auto transfer = make(1)->write(file, Bytes(0), source);
  EXPECT_THAT(message_of<IoError>([&] { transfer->wait(); }), HasSubstr("got=5"));
}

TEST_F(ThreadEngine, AFileTruncatedUnderAReaderIsAnError) {
  folder_.write("data", std::string(1000, 'x'));
  const io::File file(folder_ / "data", io::File::Mode::kRead);
  const auto engine = make(2);
  std::vector<std::byte> target(1000);
  EXPECT_NO_THROW(engine->read(file, Bytes(0), target)->wait());
  std::filesystem::resize_file(file.path(), 420);
  const auto transfer = engine->read(file, Bytes(0), target);
  EXPECT_THAT(message_of<IoError>([&] { transfer->wait(); }), HasSubstr("wanted=1000 got=420"));
}

TEST_F(ThreadEngine, EverySeedOfShortAndInterruptedTransfersGivesTheSameBytes) {
  const auto source = patterned_bytes(2345, 4);
  for (int seed = 0; seed < 300; ++seed) {
    io::ThreadEngine engine({.piece = 500_B, .threads = 2, .queue_max = 2},
                            std::make_shared<FaultyCalls>(static_cast<unsigned>(seed)));
    io::File file(folder_ / "data", io::File::Mode::kCreate);
    engine.write(file, Bytes(seed), source)->wait();
    std::vector<std::byte> target(source.size());
    engine.read(file, Bytes(seed), target)->wait();
    ASSERT_EQ(target, source) << "seed " << seed;
  }
}

TEST_F(ThreadEngine, RefusesOptionsThatCannotWork) {
  EXPECT_THAT(message_of<UsageError>([] { io::ThreadEngine engine({.threads = 0}); }),
              HasSubstr("threads=0"));
  EXPECT_THROW(io::ThreadEngine({.piece = 0_B}), UsageError);
  EXPECT_THROW(io::ThreadEngine({.queue_max = 0}), UsageError);
}

}  // namespace
}  // namespace strata::testing
