// Spreads one range of bytes over several files, so that several drives serve it at once. The range
// is cut into chunks, which go to the files in turns, more often to the faster ones: with speeds 3
// and 1, three chunks of four lie in the first file. The offset of a byte depends on the speeds
// alone, so the range may grow. Pure arithmetic; immutable, safe everywhere. Errors: UsageError
// from the constructor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/io/io_engine.h"

namespace strata::io {

class Striping {
 public:
  // `speeds`: the relative speed of each part, in any unit. `chunk`: a multiple of
  // File::kDirectBlock where transfers bypass the page cache.
  explicit Striping(const std::vector<double>& speeds, Bytes chunk = 1_MiB) : chunk_(chunk) {
    const bool known =
        std::ranges::all_of(speeds, [](double speed) { return speed > 0 && std::isfinite(speed); });
    if (speeds.empty() || !known || chunk < 1_B)
      throw UsageError(
          "to stripe bytes takes parts, speeds above 0, and chunks of at least a byte: parts={} "
          "chunk={}",
          speeds.size(), chunk.value);
    chunks_a_round_ = chunks_by_speed(speeds);
    // The part that is furthest behind its share comes next, so that each part's chunks are spread.
    const std::int64_t length =
        std::accumulate(chunks_a_round_.begin(), chunks_a_round_.end(), std::int64_t{0});
    std::vector<std::int64_t> given(speeds.size());
    for (std::int64_t turn = 1; turn <= length; ++turn) {
      std::vector<std::int64_t> behind;
      for (std::size_t part = 0; part < speeds.size(); ++part)
        behind.push_back(turn * chunks_a_round_[part] - length * given[part]);
      const auto next = static_cast<std::size_t>(std::ranges::max_element(behind) - behind.begin());
      round_.push_back({next, given[next]++});
    }
  }

  std::size_t parts() const { return chunks_a_round_.size(); }
  // The bytes of [0, `bytes`) that lie in the part.
  Bytes share_of(std::size_t part, Bytes bytes) const {
    const std::int64_t chunks = bytes / chunk_;  // whole ones
    const auto length = static_cast<std::int64_t>(round_.size());
    std::int64_t mine = chunks / length * chunks_a_round_[part];
    for (std::int64_t turn = 0; turn < chunks % length; ++turn)
      mine += round_[static_cast<std::size_t>(turn)].part == part ? 1 : 0;
    const bool has_rest = round_[static_cast<std::size_t>(chunks % length)].part == part;
    return chunk_ * mine + (has_rest ? bytes % chunk_ : Bytes());
  }

  // A run of bytes that is one range of a part.
  struct Run {
    std::size_t part;
    Bytes offset;  // in the part
    Bytes begin;   // relative to the range
    Bytes bytes;
  };
  // The runs of [offset, offset + bytes), in order; offset is not negative.
  std::vector<Run> runs_of(Bytes offset, Bytes bytes) const {
    STRATA_ASSERT(offset >= 0_B);
    std::vector<Run> runs;
    const auto length = static_cast<std::int64_t>(round_.size());
    for (Bytes begin; begin < bytes;) {
      const std::int64_t chunk = (offset + begin) / chunk_;
      const Bytes within = (offset + begin) % chunk_;
      const Turn& turn = round_[static_cast<std::size_t>(chunk % length)];
      const Bytes at =
          chunk_ * (chunk / length * chunks_a_round_[turn.part] + turn.before) + within;
      const Bytes part = std::min(bytes - begin, chunk_ - within);
      const bool joins = !runs.empty() && runs.back().part == turn.part &&
                         runs.back().offset + runs.back().bytes == at;
      if (joins)
        runs.back().bytes += part;
      else
        runs.push_back({turn.part, at, begin, part});
      begin += part;
    }
    return runs;
  }

 private:
  // The most chunks of the fastest part in one round. A round has fewer if those give each part its
  // share with at most this relative error.
  static constexpr int kChunksMax = 16;
  static constexpr double kGoodEnough = 0.02;

  static std::vector<std::int64_t> chunks_by_speed(const std::vector<double>& speeds) {
    const double fastest = *std::ranges::max_element(speeds);
    std::vector<std::int64_t> best;
    double least = std::numeric_limits<double>::infinity();
    for (int most = 1; most <= kChunksMax && least > kGoodEnough; ++most) {
      std::vector<std::int64_t> chunks;
      double worst = 0;  // relative error of a part's share
      for (const double speed : speeds) {
        const double wanted = speed / fastest * most;
        chunks.push_back(std::max<std::int64_t>(1, std::llround(wanted)));
        worst = std::max(worst, std::abs(static_cast<double>(chunks.back()) / wanted - 1));
      }
      if (worst < least) best = chunks;
      least = std::min(least, worst);
    }
    return best;
  }
  // The part that has a chunk of a round, and the number of that part's chunks before it.
  struct Turn {
    std::size_t part;
    std::int64_t before;
  };

  std::vector<std::int64_t> chunks_a_round_;  // of each part
  std::vector<Turn> round_;                   // the order of chunks, again and again
  Bytes chunk_;
};

class JoinedTransfer final : public Transfer {
 public:
  explicit JoinedTransfer(std::vector<std::unique_ptr<Transfer>> parts)
      : parts_(std::move(parts)) {}
  bool done() override {
    return std::ranges::all_of(parts_, [](const auto& part) { return part->done(); });
  }
  void wait() override {
    FirstError first;
    for (const auto& part : parts_) first.attempt([&] { part->wait(); });
    first.rethrow();
  }
  std::optional<TransferTimes> times() const override {
    std::optional<TransferTimes> all;
    for (const auto& part : parts_) {
      const std::optional<TransferTimes> times = part->times();
      if (!times) return std::nullopt;
      if (!all) all = times;
      all = {std::min(all->begin, times->begin), std::max(all->end, times->end)};
    }
    return all;
  }

 private:
  std::vector<std::unique_ptr<Transfer>> parts_;
};

// Several transfers as one. wait() waits for all, and throws the first error in their order.
inline std::unique_ptr<Transfer> joined(std::vector<std::unique_ptr<Transfer>> transfers) {
  if (transfers.size() == 1) return std::move(transfers.front());
  return std::make_unique<JoinedTransfer>(std::move(transfers));
}

}  // namespace strata::io
