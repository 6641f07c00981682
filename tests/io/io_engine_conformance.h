// Every IoEngine must pass this suite. A test of an implementation defines a type with
// `static constexpr Bytes kPiece` (how the engine cuts transfers, so that the sizes here straddle
// it) and `static std::unique_ptr<io::IoEngine> make()`, and gives it to
// INSTANTIATE_TYPED_TEST_SUITE_P(Name, IoEngineConformance, Type). make() throws EngineNotHere
// where the system has no such engine.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>

#include "io/temporary_folder.h"
#include "strata/io/io_engine.h"

namespace strata::testing {

class EngineNotHere : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename Implementation>
class IoEngineConformance : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      engine_ = Implementation::make();
    } catch (const EngineNotHere& error) {
      GTEST_SKIP() << error.what();
    }
  }
  TemporaryFolder folder_;
  std::unique_ptr<io::IoEngine> engine_;
};

TYPED_TEST_SUITE_P(IoEngineConformance);

TYPED_TEST_P(IoEngineConformance, ReadsBackWhatWasWrittenAtEverySizeAroundAPiece) {
  const std::int64_t piece = TypeParam::kPiece.value;
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  for (const std::int64_t bytes :
       {std::int64_t{0}, std::int64_t{1}, piece - 1, piece, piece + 1, 3 * piece, 3 * piece + 17}) {
    for (const std::int64_t offset : {std::int64_t{0}, std::int64_t{13}, piece}) {
      const auto source = patterned_bytes(static_cast<std::size_t>(bytes), 7);
      this->engine_->write(file, Bytes(offset), source)->wait();
      std::vector<std::byte> target(source.size());
      this->engine_->read(file, Bytes(offset), target)->wait();
      ASSERT_EQ(target, source) << "bytes " << bytes << " offset " << offset;
    }
  }
}

TYPED_TEST_P(IoEngineConformance, KnowsWhenATransferRan) {
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  const auto source = patterned_bytes(TypeParam::kPiece.size() * 3 + 17, 7);
  const auto before = std::chrono::steady_clock::now();
  const auto transfer = this->engine_->write(file, 0_B, source);
  transfer->wait();
  const auto after = std::chrono::steady_clock::now();
  ASSERT_TRUE(transfer->times());
  EXPECT_LE(before, transfer->times()->begin);
  EXPECT_LE(transfer->times()->begin, transfer->times()->end);
  EXPECT_LE(transfer->times()->end, after);
  const auto nothing = this->engine_->write(file, 0_B, {});
  nothing->wait();
  EXPECT_FALSE(nothing->times());
}

TYPED_TEST_P(IoEngineConformance, WritesInAnyOrderLandEachInItsPlace) {
  const std::size_t bytes = 200 * 101;
  const auto source = patterned_bytes(bytes, 3);
  std::vector<std::size_t> order(200);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(5));
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  std::vector<std::unique_ptr<io::Transfer>> transfers;
  for (const std::size_t i : order) {
    transfers.push_back(
        this->engine_->write(file, Bytes(i * 101), std::span(source).subspan(i * 101, 101)));
  }
  for (const auto& transfer : transfers) transfer->wait();
  EXPECT_EQ(file.size(), Bytes(bytes));
  std::vector<std::byte> target(bytes);
  this->engine_->read(file, Bytes(0), target)->wait();
  EXPECT_EQ(target, source);
}

TYPED_TEST_P(IoEngineConformance, ServesSeveralThreadsAtOnce) {
  const std::size_t each = TypeParam::kPiece.size() * 2 + 5;
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  std::vector<std::vector<std::byte>> targets(4);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const Bytes offset(static_cast<std::size_t>(t) * each);
      const auto source = patterned_bytes(each, t);
      for (int round = 0; round < 20; ++round) {
        this->engine_->write(file, offset, source)->wait();
        targets[t].assign(each, std::byte{0});
        this->engine_->read(file, offset, targets[t])->wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (unsigned t = 0; t < 4; ++t) EXPECT_EQ(targets[t], patterned_bytes(each, t));
}

TYPED_TEST_P(IoEngineConformance, ReadingPastTheEndSaysWhatWasWantedAndWhatWasThere) {
  this->folder_.write("short", std::string(1000, 'x'));
  const io::File file(this->folder_ / "short", io::File::Mode::kRead);
  std::vector<std::byte> target(500);
  const auto transfer = this->engine_->read(file, Bytes(600), target);
  const std::string message = message_of<IoError>([&] { transfer->wait(); });
  EXPECT_THAT(message, ::testing::HasSubstr("ends before the range"));
  EXPECT_THAT(message, ::testing::HasSubstr("path=" + file.path()));
  EXPECT_THAT(message, ::testing::HasSubstr("offset=600 wanted=500 got=400"));
  EXPECT_TRUE(transfer->done());
  EXPECT_EQ(message_of<IoError>([&] { transfer->wait(); }), message);
}

TYPED_TEST_P(IoEngineConformance, ABigReadPastTheEndCountsWhatLiesBeforeIt) {
  const std::int64_t piece = TypeParam::kPiece.value;
  this->folder_.write("short", std::string(static_cast<std::size_t>(2 * piece + 3), 'x'));
  const io::File file(this->folder_ / "short", io::File::Mode::kRead);
  std::vector<std::byte> target(static_cast<std::size_t>(5 * piece));
  const auto transfer = this->engine_->read(file, Bytes(1), target);
  EXPECT_THAT(
      message_of<IoError>([&] { transfer->wait(); }),
      ::testing::HasSubstr(fmt::format("offset=1 wanted={} got={}", 5 * piece, 2 * piece + 2)));
}

TYPED_TEST_P(IoEngineConformance, WritingToAFileOpenedForReadingNamesErrno) {
  this->folder_.write("data", "abc");
  const io::File file(this->folder_ / "data", io::File::Mode::kRead);
  const auto source = patterned_bytes(10, 1);
  const auto transfer = this->engine_->write(file, Bytes(2), source);
  const std::string message = message_of<IoError>([&] { transfer->wait(); });
  EXPECT_THAT(message, ::testing::HasSubstr("write failed: path=" + file.path()));
  EXPECT_THAT(message, ::testing::HasSubstr("offset=2 wanted=10 got=0 errno=9"));
}

TYPED_TEST_P(IoEngineConformance, AFailedTransferLeavesTheOthersAlone) {
  const auto source = patterned_bytes(4000, 9);
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  this->engine_->write(file, Bytes(0), source)->wait();
  std::vector<std::byte> good(4000);
  std::vector<std::byte> bad(4000);
  const auto first = this->engine_->read(file, Bytes(1), bad);
  const auto second = this->engine_->read(file, Bytes(0), good);
  EXPECT_NO_THROW(second->wait());
  EXPECT_EQ(good, source);
  EXPECT_THROW(first->wait(), IoError);
}

TYPED_TEST_P(IoEngineConformance, ADroppedTransferIsFinishedAndItsErrorDropped) {
  const auto source = patterned_bytes(TypeParam::kPiece.size() * 4, 2);
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  this->engine_->write(file, Bytes(0), source).reset();
  std::vector<std::byte> target(source.size());
  this->engine_->read(file, Bytes(0), target).reset();
  EXPECT_EQ(target, source);
  EXPECT_NO_THROW(this->engine_->read(file, Bytes(1), target).reset());
}

TYPED_TEST_P(IoEngineConformance, ATransferMayOutliveItsEngine) {
  const auto source = patterned_bytes(TypeParam::kPiece.size() * 3, 2);
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  const auto transfer = this->engine_->write(file, Bytes(0), source);
  this->engine_.reset();
  EXPECT_TRUE(transfer->done());
  EXPECT_NO_THROW(transfer->wait());
  EXPECT_EQ(file.size(), Bytes(source.size()));
}

TYPED_TEST_P(IoEngineConformance, WhatIsUnderWayIsFinishedBeforeTheEngineGoes) {
  const std::size_t each = TypeParam::kPiece.size() * 2 + 1;
  const auto source = patterned_bytes(each * 20, 6);
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  std::vector<std::unique_ptr<io::Transfer>> transfers;
  for (std::size_t i = 0; i < 20; ++i) {
    transfers.push_back(
        this->engine_->write(file, Bytes(i * each), std::span(source).subspan(i * each, each)));
  }
  const io::File other(this->folder_.write("short", "x"), io::File::Mode::kRead);
  std::vector<std::byte> target(2);
  const auto failing = this->engine_->read(other, Bytes(0), target);
  this->engine_.reset();
  for (const auto& transfer : transfers) EXPECT_TRUE(transfer->done());
  EXPECT_THROW(failing->wait(), IoError);
  EXPECT_EQ(content_of(file.path()),
            std::string(reinterpret_cast<const char*>(source.data()), source.size()));
}

TYPED_TEST_P(IoEngineConformance, AThreadThatEndsLeavesItsTransfersUnderWay) {
  const auto source = patterned_bytes(TypeParam::kPiece.size() * 5, 8);
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  std::vector<std::byte> target(source.size());
  std::unique_ptr<io::Transfer> transfer;
  std::thread([&] { transfer = this->engine_->write(file, Bytes(0), source); }).join();
  EXPECT_NO_THROW(transfer->wait());
  std::thread([&] { transfer = this->engine_->read(file, Bytes(0), target); }).join();
  EXPECT_NO_THROW(transfer->wait());
  EXPECT_EQ(target, source);
}

TYPED_TEST_P(IoEngineConformance, RegisteredMemoryIsReadIntoAndWrittenFromAsAnyOther) {
  const std::size_t bytes = TypeParam::kPiece.size() * 4 + 3;
  auto source = patterned_bytes(bytes, 4);
  std::vector<std::byte> target(bytes);
  io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  const auto round = [&] {
    this->engine_->write(file, Bytes(5), source)->wait();
    std::ranges::fill(target, std::byte{0});
    this->engine_->read(file, Bytes(5), target)->wait();
    EXPECT_EQ(target, source);
    std::ranges::reverse(source);
  };
  auto first = this->engine_->register_memory(source);
  auto second = this->engine_->register_memory(std::span(target).first(bytes / 2));
  round();
  first.reset();
  round();
  this->engine_->register_memory({}).reset();
  this->engine_.reset();
  second.reset();
}

TYPED_TEST_P(IoEngineConformance, ARangeThatNoFileHasIsRefusedAtOnce) {
  const io::File file(this->folder_ / "data", io::File::Mode::kCreate);
  std::vector<std::byte> target(4);
  EXPECT_THAT(message_of<UsageError>([&] { this->engine_->read(file, Bytes(-1), target); }),
              ::testing::HasSubstr("offset=-1 bytes=4"));
  const Bytes last(std::numeric_limits<std::int64_t>::max());
  EXPECT_THROW(this->engine_->write(file, last, target), UsageError);
}

REGISTER_TYPED_TEST_SUITE_P(
    IoEngineConformance, ReadsBackWhatWasWrittenAtEverySizeAroundAPiece, KnowsWhenATransferRan,
    WritesInAnyOrderLandEachInItsPlace, ServesSeveralThreadsAtOnce,
    ReadingPastTheEndSaysWhatWasWantedAndWhatWasThere, ABigReadPastTheEndCountsWhatLiesBeforeIt,
    WritingToAFileOpenedForReadingNamesErrno, AFailedTransferLeavesTheOthersAlone,
    ADroppedTransferIsFinishedAndItsErrorDropped, ATransferMayOutliveItsEngine,
    WhatIsUnderWayIsFinishedBeforeTheEngineGoes, AThreadThatEndsLeavesItsTransfersUnderWay,
    RegisteredMemoryIsReadIntoAndWrittenFromAsAnyOther, ARangeThatNoFileHasIsRefusedAtOnce);

}  // namespace strata::testing
