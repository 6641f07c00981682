// Pipelines: every piece once and in order, as many in flight as the ring has buffers, and no
// buffer is used again before the last use of it has ended, also after an error.
#include "strata/checkpoint/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device/late_device.h"
#include "strata/base/error.h"

namespace strata::checkpoint {
namespace {

using ::testing::ElementsAre;

// A transfer that is told when it is waited for.
class Told final : public io::Transfer {
 public:
  Told(std::vector<std::string>& events, std::string name, bool fails = false)
      : events_(events), name_(std::move(name)), fails_(fails) {}
  ~Told() override { tell(); }
  bool done() override { return told_; }
  void wait() override {
    tell();
    if (fails_) throw IoError(name_ + " failed");
  }

 private:
  void tell() {
    if (!told_) events_.push_back(name_);
    told_ = true;
  }
  std::vector<std::string>& events_;
  std::string name_;
  bool fails_;
  bool told_ = false;
};

// Pieces that are filled and taken by transfers; `events` says in which order they end.
class Transfers : public ::testing::Test {
 protected:
  struct From final : Source {
    From(std::vector<std::string>& the_events, std::size_t the_pieces)
        : events(the_events), pieces(the_pieces) {}
    bool next(Piece& piece) override {
      piece.file = next_;
      piece.bytes = 16_B;
      return next_++ < pieces;
    }
    std::unique_ptr<io::Transfer> fill(Piece& piece, std::span<std::byte>) override {
      ++in_flight;
      most = std::max(most, in_flight);
      return std::make_unique<Told>(events, "filled " + std::to_string(piece.file),
                                    piece.file == fails_at);
    }
    void failed(const Piece& piece) override {
      --in_flight;
      if (!leaves_out) throw;
      events.push_back("left out " + std::to_string(piece.file));
    }
    std::vector<std::string>& events;
    std::size_t pieces;
    std::size_t next_ = 0;
    std::size_t in_flight = 0;
    std::size_t most = 0;
    std::size_t fails_at = 99;
    bool leaves_out = false;
  };
  struct To final : Sink {
    explicit To(From& the_from) : from(the_from) {}
    std::unique_ptr<io::Transfer> take(const Piece& piece) override {
      --from.in_flight;
      from.events.push_back("take " + std::to_string(piece.file));
      if (piece.file == throws_at) throw UsageError("no more");
      return std::make_unique<Told>(from.events, "taken " + std::to_string(piece.file));
    }
    void settle() override { from.events.push_back("settle"); }
    From& from;
    std::size_t throws_at = 99;
  };

  std::vector<std::string> events_;
  TransferRing ring_{{3, 16_B}, nullptr};
};

TEST_F(Transfers, EveryPieceIsTakenOnceInOrder) {
  From from(events_, 4);
  To to(from);
  copy(from, to, ring_, {.taking = 1});
  EXPECT_EQ(from.most, 3U) << "the ring's buffers";
  EXPECT_THAT(events_, ElementsAre("filled 0", "take 0", "filled 1", "take 1", "taken 0",
                                   "filled 2", "take 2", "filled 3", "take 3", "settle", "taken 3",
                                   "taken 1", "taken 2"));
}

TEST_F(Transfers, SyncPointsAreReachedWhenAllBeforeThemIsTaken) {
  From from(events_, 3);
  To to(from);
  const SyncPoints points{
      .places = {{0, Bytes()}, {2, Bytes()}, {9, Bytes()}},
      .reached = [&](std::size_t i) { events_.push_back("reached " + std::to_string(i)); },
      .begun = [&] { events_.emplace_back("begun"); }};
  Pipeline pipeline(from, to, ring_, {.sync_points = &points});
  pipeline.pump();
  EXPECT_THAT(events_, ::testing::IsEmpty()) << "pieces are only begun";
  pipeline.take_all();
  EXPECT_THAT(events_, ElementsAre("begun", "settle", "reached 0", "filled 0", "take 0", "filled 1",
                                   "take 1", "settle", "reached 1", "filled 2", "take 2", "settle",
                                   "reached 2", "settle"));
}

TEST_F(Transfers, AfterAnErrorNothingIsInFlight) {
  From from(events_, 5);
  from.fails_at = 1;
  To to(from);
  EXPECT_THROW(copy(from, to, ring_), IoError);
  EXPECT_THAT(events_,
              ElementsAre("filled 0", "take 0", "taken 0", "filled 1", "filled 3", "filled 2"));
}

TEST_F(Transfers, APieceThatCannotBeFilledMayBeLeftOut) {
  From from(events_, 3);
  from.fails_at = 1;
  from.leaves_out = true;
  To to(from);
  copy(from, to, ring_);
  EXPECT_THAT(events_, ElementsAre("filled 0", "take 0", "filled 1", "left out 1", "filled 2",
                                   "take 2", "settle", "taken 0", "taken 2"));
}

// Fills buffers with a number, and queues copies of them to memory of the device.
class Queued : public ::testing::Test {
 protected:
  static constexpr Bytes kBuffer = 64_KiB;
  struct From final : Source {
    From(std::size_t the_pieces, int the_value) : pieces(the_pieces), value(the_value) {}
    bool next(Piece& piece) override {
      piece.bytes = kBuffer;
      return next_++ < pieces;
    }
    std::unique_ptr<io::Transfer> fill(Piece& piece, std::span<std::byte>) override {
      std::ranges::fill(piece.content, static_cast<std::byte>(value));
      return nullptr;
    }
    std::size_t pieces;
    int value;
    std::size_t next_ = 0;
  };
  struct To final : Sink {
    To(device::Device& the_device, std::span<std::byte> the_target)
        : device(the_device), target(the_target) {}
    device::Stream* stream() override { return &device.compute_stream(); }
    std::unique_ptr<io::Transfer> take(const Piece& piece) override {
      device.copy(target.subspan(piece.index * kBuffer.size(), kBuffer.size()), piece.content,
                  *stream());
      if (piece.index == throws_at) throw UsageError("in the middle of a batch");
      return nullptr;
    }
    device::Device& device;
    std::span<std::byte> target;
    std::size_t throws_at = 99;
  };

  static bool holds(std::span<const std::byte> bytes, int value) {
    return std::ranges::all_of(bytes,
                               [&](std::byte b) { return b == static_cast<std::byte>(value); });
  }

  device::LateDevice device_;
  std::unique_ptr<device::Memory> memory_ = device_.allocate(kBuffer * 8, memory::Kind::kStaging);
};

TEST_F(Queued, ABufferIsFilledAgainWhenTheStreamHasReadIt) {
  TransferRing ring({2, kBuffer}, device_);
  From from(8, 7);
  To to(device_, memory_->bytes());
  copy(from, to, ring);
  device_.compute_stream().synchronize();
  EXPECT_TRUE(holds(memory_->bytes(), 7));
}

TEST_F(Queued, AlsoAfterABatchThatWasQueuedInPart) {
  for (int round = 0; round < 20; ++round) {
    TransferRing ring({2, kBuffer}, device_);
    From from(1, 1);
    To to(device_, memory_->bytes());
    to.throws_at = 0;
    EXPECT_THROW(copy(from, to, ring), UsageError);
    const std::size_t turn = ring.next();
    std::ranges::fill(ring.buffer(turn), std::byte{2});
    std::ranges::fill(ring.buffer(ring.next()), std::byte{2});
    device_.compute_stream().synchronize();
    EXPECT_TRUE(holds(memory_->bytes().first(kBuffer.size()), 1));
  }
}

}  // namespace
}  // namespace strata::checkpoint
