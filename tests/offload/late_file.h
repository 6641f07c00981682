// A BlockFile in memory whose transfers happen late: the seed decides whether a transfer happens
// when the caller asks its Transfer for its end, or when the caller waits for it. Until then the
// target of a read holds arbitrary bytes, and a write takes the bytes that its source holds when it
// happens. So a caller that uses memory or ranges of the file too early finds wrong bytes.
// Overlapping transfers in flight end the test. Some transfers fail; the file counts them. The
// transfers of a prompt file are not late. Their reported times are those of transfers in a row at
// 1 GB/s. Threads: one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <list>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/offload/block_file.h"

namespace strata::testing {

class LateFile final : public offload::BlockFile {
 public:
  // `failing`: of a thousand transfers.
  LateFile(unsigned seed, unsigned failing, bool prompt = false)
      : random_(seed), failing_(failing), prompt_(prompt) {}
  ~LateFile() override { EXPECT_TRUE(flights_.empty()) << "the file went before its transfers"; }
  LateFile(const LateFile&) = delete;
  LateFile& operator=(const LateFile&) = delete;

  const std::string& path() const override { return path_; }
  void grow(Bytes size) override { bytes_.resize(size.size(), std::byte{0xA5}); }
  std::unique_ptr<io::Transfer> read(Bytes offset, std::span<std::byte> target) override {
    std::ranges::fill(target, std::byte{0xEE});
    return begin(
        {.offset = offset, .memory = target.data(), .bytes = target.size(), .target = target});
  }
  std::unique_ptr<io::Transfer> write(Bytes offset, std::span<const std::byte> source) override {
    return begin(
        {.offset = offset, .memory = source.data(), .bytes = source.size(), .source = source});
  }
  std::vector<offload::DriveWrites> drive_writes() const override { return {{"/drive", written_}}; }

  int failed_reads() const { return failed_reads_; }
  int failed_writes() const { return failed_writes_; }

 private:
  struct Flight {
    Bytes offset;
    const std::byte* memory = nullptr;
    std::size_t bytes = 0;
    std::span<std::byte> target = {};
    std::span<const std::byte> source = {};
    io::TransferTimes times = {};
    bool happened = false;
    bool failed = false;
  };
  using Flights = std::list<Flight>;

  class LateTransfer final : public io::Transfer {
   public:
    LateTransfer(LateFile& file, Flights::iterator flight) : file_(file), flight_(flight) {}
    ~LateTransfer() override {
      file_.happen(*flight_);
      file_.flights_.erase(flight_);
    }
    bool done() override {
      if (file_.random_() % 2 == 0) file_.happen(*flight_);
      return flight_->happened;
    }
    void wait() override {
      file_.happen(*flight_);
      if (!flight_->failed) return;
      throw IoError(fmt::format("{} failed: path={} offset={} wanted={} got=0 EIO",
                                flight_->target.empty() ? "write" : "read", file_.path_,
                                flight_->offset.value, flight_->bytes));
    }

    std::optional<io::TransferTimes> times() const override { return flight_->times; }

   private:
    LateFile& file_;
    const Flights::iterator flight_;
  };

  std::unique_ptr<io::Transfer> begin(const Flight& flight) {
    const auto end = flight.offset + Bytes(flight.bytes);
    EXPECT_LE(end.size(), bytes_.size());
    EXPECT_EQ(flight.offset % 4_KiB, 0_B);
    EXPECT_EQ(Bytes(flight.bytes) % 4_KiB, 0_B);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(flight.memory) % 4096, 0U);
    for (const Flight& other : flights_) {
      const bool same_file =
          flight.offset < other.offset + Bytes(other.bytes) && other.offset < end;
      const bool same_memory =
          flight.memory < other.memory + other.bytes && other.memory < flight.memory + flight.bytes;
      EXPECT_FALSE(same_file || same_memory) << "two transfers at once at " << flight.offset.value;
    }
    flights_.push_back(flight);
    if (prompt_) happen(flights_.back());
    return std::make_unique<LateTransfer>(*this, std::prev(flights_.end()));
  }

  void happen(Flight& flight) {
    if (flight.happened) return;
    flight.happened = true;
    flight.times.begin = now_;
    now_ += std::chrono::nanoseconds(flight.bytes);
    flight.times.end = now_;
    if (flight.target.empty()) written_ += Bytes(flight.bytes);
    const auto place = bytes_.begin() + static_cast<std::ptrdiff_t>(flight.offset.value);
    if (random_() % 1000 < failing_) {
      flight.failed = true;
      ++(flight.target.empty() ? failed_writes_ : failed_reads_);
      // Half of it, perhaps.
      if (!flight.source.empty()) std::ranges::copy(flight.source.first(flight.bytes / 2), place);
    } else if (flight.target.empty()) {
      std::ranges::copy(flight.source, place);
    } else {
      std::copy_n(place, flight.bytes, flight.target.begin());
    }
  }

  const std::string path_ = "/drive/late";
  std::mt19937 random_;
  const unsigned failing_;
  const bool prompt_;
  std::vector<std::byte> bytes_;
  Flights flights_;
  std::chrono::steady_clock::time_point now_ = std::chrono::steady_clock::now();
  Bytes written_;
  int failed_reads_ = 0;
  int failed_writes_ = 0;
};

}  // namespace strata::testing
