#include "strata/io/read_probe.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "strata/base/error.h"
#include "strata/io/page_cache.h"

namespace strata::io {
namespace {

// Reads [offset, offset + bytes) with as many transfers under way as there are buffers; seconds.
double timed_read(const File& file, Bytes offset, Bytes bytes, IoEngine& io,
                  std::span<const std::span<std::byte>> buffers) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<Transfer>> transfers(buffers.size());
  std::size_t turn = 0;
  for (Bytes at; at < bytes; turn = (turn + 1) % buffers.size()) {
    if (transfers[turn]) transfers[turn]->wait();
    const Bytes part = std::min(bytes - at, Bytes(buffers[turn].size()));
    transfers[turn] = io.read(file, offset + at, buffers[turn].first(part.size()));
    at += part;
  }
  for (const auto& transfer : transfers) {
    if (transfer) transfer->wait();
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

ReadProbe::ReadProbe(std::span<const ReadableFile> files, std::span<const FileRange> ranges,
                     const ReadProbeOptions& options)
    : files_(files), ranges_(ranges), options_(options) {
  STRATA_ASSERT(options.samples > 0 && options.pieces > 0 && options.piece > Bytes() &&
                options.piece % File::kDirectBlock == Bytes());
  for (const FileRange& range : ranges) total_ += range.bytes;
}

// Evenly over the bytes to be read.
std::vector<ReadProbe::Place> ReadProbe::samples() const {
  std::vector<Place> places;
  Bytes before;  // bytes of the ranges that lie before this one
  for (const FileRange& range : ranges_) {
    while (static_cast<int>(places.size()) < options_.samples) {
      const auto index = static_cast<std::int64_t>(places.size());
      const Bytes at = total_ / (2 * std::int64_t{options_.samples}) * (2 * index + 1) - before;
      if (at >= range.bytes) break;
      places.push_back({range.file, range.offset + at});
    }
    before += range.bytes;
  }
  return places;
}

ReadFigures ReadProbe::look() const {
  ReadFigures figures;
  for (const FileRange& range : ranges_) {
    figures.direct_offered = figures.direct_offered || files_[range.file].direct->direct_fd() >= 0;
  }
  double known = 0.0;
  double cached = 0.0;
  for (const Place& place : samples()) {
    const std::optional<bool> here = in_page_cache(*files_[place.file].buffered, place.offset);
    if (here) known += 1.0;
    if (here.value_or(false)) cached += 1.0;
  }
  if (known > 0.0) figures.cached = cached / known;
  return figures;
}

// Pieces about samples that are not cached, spread over all of them; none where there are not
// enough that lie apart.
std::vector<ReadProbe::Place> ReadProbe::cold_pieces() const {
  std::vector<Place> apart;
  for (const Place& sample : samples()) {
    const File& file = *files_[sample.file].direct;
    const Bytes room = file.size() - options_.piece;
    if (room < Bytes() || file.direct_fd() < 0) continue;
    if (in_page_cache(file, sample.offset).value_or(false)) continue;
    const Bytes wanted = std::min(sample.offset, room);
    const Place piece{sample.file, wanted - wanted % File::kDirectBlock};
    if (!apart.empty() && apart.back().file == piece.file &&
        piece.offset - apart.back().offset < options_.piece) {
      continue;
    }
    apart.push_back(piece);
  }
  const std::size_t wanted = 2 * static_cast<std::size_t>(options_.pieces);
  if (apart.size() < wanted) return {};
  std::vector<Place> chosen;
  for (std::size_t i = 0; i < wanted; ++i) chosen.push_back(apart[i * apart.size() / wanted]);
  return chosen;
}

void ReadProbe::time_reads(ReadFigures& figures, IoEngine& io,
                           std::span<const std::span<std::byte>> buffers) const {
  STRATA_ASSERT(!buffers.empty());
  const std::vector<Place> pieces = cold_pieces();
  if (pieces.empty()) return;
  double buffered_s = 0.0;
  double direct_s = 0.0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto& [file, offset] = pieces[i];
    // Buffered, direct, direct, buffered, ...: what changes steadily meanwhile is the same to both.
    const bool direct = (i + 1) / 2 % 2 == 1;
    const File& source = direct ? *files_[file].direct : *files_[file].buffered;
    (direct ? direct_s : buffered_s) += timed_read(source, offset, options_.piece, io, buffers);
  }
  const double gigabytes = static_cast<double>((options_.piece * options_.pieces).value) * 1e-9;
  if (buffered_s > 0.0) figures.buffered_gb_per_s = gigabytes / buffered_s;
  if (direct_s > 0.0) figures.direct_gb_per_s = gigabytes / direct_s;
}

ReadChoice ReadProbe::choose(ReadWay asked, IoEngine& io,
                             std::span<const std::span<std::byte>> buffers) const {
  ReadFigures figures = look();
  if (wants_probe(asked, figures) && total_ >= options_.least) time_reads(figures, io, buffers);
  return choose_read(asked, figures);
}

}  // namespace strata::io
