#include "strata/checkpoint/reader.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"
#include "strata/io/file.h"

namespace strata::checkpoint {
namespace {

std::string share_of(const ReadFigures& figures) {
  if (!figures.cached) return "unknown how much is cached";
  return fmt::format("{:.0f}% cached", *figures.cached * 100.0);
}

}  // namespace

bool wants_probe(ReadWay asked, const ReadFigures& figures) {
  return asked == ReadWay::kAuto && figures.direct_offered &&
         figures.cached.value_or(0.0) < kCachedEnough;
}

ReadChoice choose_read(ReadWay asked, const ReadFigures& figures) {
  if (asked == ReadWay::kBuffered) return {false, "as configured", figures};
  if (!figures.direct_offered) return {false, "no direct reads to be had here", figures};
  if (asked == ReadWay::kDirect) return {true, "as configured", figures};
  if (!wants_probe(asked, figures)) return {false, share_of(figures), figures};
  if (!figures.buffered_gb_per_s || !figures.direct_gb_per_s)
    return {false, fmt::format("{}; too little to probe", share_of(figures)), figures};
  // Cached bytes cost a buffered read next to nothing, and a direct one as much as the rest.
  const double buffered = *figures.buffered_gb_per_s / (1.0 - figures.cached.value_or(0.0));
  return {*figures.direct_gb_per_s > buffered * kDirectGain,
          fmt::format("{}; probe: {:.2f} GB/s buffered, {:.2f} direct", share_of(figures),
                      *figures.buffered_gb_per_s, *figures.direct_gb_per_s),
          figures};
}

RangeSource::RangeSource(std::span<const ReadableFile> files, std::span<const FileRange> ranges,
                         io::IoEngine& io, Bytes buffer, const ReadOptions& options)
    : files_(files),
      ranges_(ranges),
      io_(io),
      most_(options.aligned == 1_B ? buffer : buffer - options.aligned),
      options_(options),
      sum_(XXH3_createState(), XXH3_freeState) {
  STRATA_ASSERT(most_ >= options.aligned && sum_ != nullptr);
}

bool RangeSource::next(Piece& piece) {
  while (range_ < ranges_.size() && done_ == ranges_[range_].bytes) {
    ++range_;
    done_ = Bytes();
  }
  if (range_ == ranges_.size()) return false;
  const FileRange& range = ranges_[range_];
  piece.file = range.file;
  piece.offset = range.offset + done_;
  const Bytes cut = piece.offset + most_ - piece.offset % options_.aligned;
  piece.bytes = std::min(cut, range.offset + range.bytes) - piece.offset;
  done_ += piece.bytes;
  return true;
}

std::unique_ptr<io::Transfer> RangeSource::fill(Piece& piece, std::span<std::byte> buffer) {
  const ReadableFile& file = files_[piece.file];
  const std::span<std::byte> room = buffer.subspan((piece.offset % options_.aligned).size());
  Bytes bytes = piece.bytes;
  if (options_.block > 1_B) {
    const Bytes whole = std::min({align_up(bytes, options_.block), Bytes(room.size()),
                                  file.buffered->size() - piece.offset});
    bytes = std::max(bytes, whole);
  }
  piece.content = room.first(bytes.size());
  return io_.read(options_.direct ? *file.direct : *file.buffered, piece.offset, piece.content);
}

void RangeSource::filled(const Piece& piece) {
  if (options_.verify == nullptr || !options_.verify->checksums) return;
  if (piece.file != summed_ || piece.offset != reached_) whole_ = false;
  const Bytes piece_end = piece.offset + Bytes(piece.content.size());
  summed_ = piece.file;
  reached_ = piece_end;
  const format::ManifestFile& file = options_.verify->files[piece.file];
  const Bytes block = file.checksums.block();
  for (Bytes at = piece.offset; at < piece_end;) {
    const Bytes begin = at - at % block;
    const Bytes end = block > file.bytes - begin ? file.bytes : begin + block;
    const Bytes stop = std::min(end, piece_end);
    if (at == begin) {
      whole_ = true;
      XXH3_64bits_reset(sum_.get());
    }
    if (whole_) {
      const std::byte* const first = piece.content.data() + (at - piece.offset).size();
      XXH3_64bits_update(sum_.get(), first, (stop - at).size());
    }
    if (whole_ && stop == end) compare(piece.file, begin, end);
    at = stop;
  }
}

void RangeSource::compare(std::size_t file, Bytes begin, Bytes end) {
  whole_ = false;
  const format::BlockChecksums& sums = options_.verify->files[file].checksums;
  const std::uint64_t found = XXH3_64bits_digest(sum_.get());
  if (sums.sums()[static_cast<std::size_t>(begin / sums.block())] == found) return;
  options_.verify->wrong({file, begin, end, "is not what was written"});
}

void RangeSource::failed(const Piece& piece) {
  if (options_.verify == nullptr) throw;
  try {
    throw;
  } catch (const IoError& error) {
    options_.verify->wrong({piece.file, piece.offset, piece.offset + piece.bytes, error.what(),
                            std::current_exception()});
  }
}

std::vector<FileRange> whole_blocks(std::span<const FileRange> ranges,
                                    std::span<const format::ManifestFile> files) {
  std::vector<FileRange> result;
  for (const FileRange& range : ranges) {
    const format::ManifestFile& file = files[range.file];
    const Bytes block = file.checksums.block();
    const Bytes begin = range.offset - range.offset % block;
    const Bytes last = range.offset + range.bytes;
    const Bytes over = last % block;
    const Bytes end = over.value == 0                    ? last
                      : block - over > file.bytes - last ? file.bytes
                                                         : last + block - over;
    if (!result.empty() && result.back().file == range.file &&
        result.back().offset + result.back().bytes >= begin) {
      result.back().bytes = std::max(result.back().bytes, end - result.back().offset);
    } else {
      result.push_back({range.file, begin, end - begin});
    }
  }
  return result;
}

io::File open_file(const std::string& folder, const format::ManifestFile& file) {
  const std::string path = folder + "/" + file.name;
  std::error_code error;
  if (std::filesystem::symlink_status(path, error).type() ==
      std::filesystem::file_type::not_found) {
    throw IoError(
        "cannot open a checkpoint: it lacks a file that its manifest names; is it copied wholly?: "
        "file={} path={}",
        format::in_quotes(file.name), path);
  }
  format::require_inside(folder, path);
  io::File opened(path, io::File::Mode::kRead);
  if (const Bytes found = opened.size(); found != file.bytes)
    throw FormatError(
        "a file of a checkpoint is cut off or was replaced: it has another size than when it was "
        "written; copy it again: file={} wanted={} found={} path={}",
        format::in_quotes(file.name), file.bytes.value, found.value, path);
  return opened;
}

CheckpointFiles::CheckpointFiles(const std::string& folder, const format::Manifest& manifest,
                                 const std::optional<std::set<std::size_t>>& wanted)
    : manifest_(manifest), files_(manifest.files.size()) {
  // Each may be opened again, past the page cache.
  io::allow_descriptors((wanted ? wanted->size() : files_.size()) * 2);
  for (std::size_t i = 0; i < files_.size(); ++i)
    if (!wanted || wanted->contains(i)) files_[i].emplace(open_file(folder, manifest.files[i]));
}

std::vector<const io::File*> CheckpointFiles::pointers() const {
  std::vector<const io::File*> all;
  for (const auto& file : files_) all.push_back(file ? &*file : nullptr);
  return all;
}

std::vector<ReadableFile> CheckpointFiles::readable() const {
  std::vector<ReadableFile> all;
  for (const auto& file : files_) all.push_back({file ? &*file : nullptr, nullptr});
  return all;
}

Verification CheckpointFiles::verification() const {
  return {manifest_.files, true, [this](const WrongRange& wrong) { fail(wrong); }};
}

Bytes CheckpointFiles::block() const {
  Bytes largest = 1_B;
  for (const format::ManifestFile& file : manifest_.files)
    largest = std::max(largest, file.checksums.block());
  return largest;
}

void CheckpointFiles::fail(const WrongRange& wrong) const {
  if (wrong.cause) std::rethrow_exception(wrong.cause);
  const std::vector<std::string> owners = owners_of(manifest_, wrong.file, wrong.begin, wrong.end);
  throw FormatError(
      "bytes of a checkpoint are not what was written (their checksum differs), of {}; load "
      "another checkpoint, or copy the file again: path={} begin={} end={}",
      owners.empty() ? "the header" : format::first_ten(owners), files_[wrong.file]->path(),
      wrong.begin.value, wrong.end.value);
}

ReadProbe::ReadProbe(std::span<const ReadableFile> files, std::span<const FileRange> ranges,
                     const ReadProbeOptions& options)
    : files_(files), ranges_(ranges), options_(options) {
  STRATA_ASSERT(options.samples > 0 && options.pieces > 0 && options.piece > Bytes() &&
                options.piece % io::File::kDirectBlock == Bytes());
  for (const FileRange& range : ranges) total_ += range.bytes;
}

// Evenly over the bytes to be read.
std::vector<format::FileOffset> ReadProbe::samples() const {
  std::vector<format::FileOffset> places;
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
  figures.direct_offered = std::ranges::any_of(
      ranges_, [&](const FileRange& range) { return files_[range.file].direct->direct_fd() >= 0; });
  double known = 0.0;
  double cached = 0.0;
  for (const format::FileOffset& place : samples()) {
    const std::optional<bool> here = io::in_page_cache(*files_[place.file].buffered, place.offset);
    if (here) known += 1.0;
    if (here.value_or(false)) cached += 1.0;
  }
  if (known > 0.0) figures.cached = cached / known;
  return figures;
}

// Pieces about samples that are not cached, spread over all of them; none where there are not
// enough that lie apart.
std::vector<format::FileOffset> ReadProbe::cold_pieces() const {
  std::vector<format::FileOffset> apart;
  for (const format::FileOffset& sample : samples()) {
    const io::File& file = *files_[sample.file].direct;
    const Bytes room = file.size() - options_.piece;
    if (room < Bytes() || file.direct_fd() < 0) continue;
    if (io::in_page_cache(file, sample.offset).value_or(false)) continue;
    const Bytes wanted = std::min(sample.offset, room);
    const format::FileOffset piece{sample.file, wanted - wanted % io::File::kDirectBlock};
    if (!apart.empty() && apart.back().file == piece.file &&
        piece.offset - apart.back().offset < options_.piece) {
      continue;
    }
    apart.push_back(piece);
  }
  const std::size_t wanted = 2 * static_cast<std::size_t>(options_.pieces);
  if (apart.size() < wanted) return {};
  std::vector<format::FileOffset> chosen;
  for (std::size_t i = 0; i < wanted; ++i) chosen.push_back(apart[i * apart.size() / wanted]);
  return chosen;
}

void ReadProbe::time_reads(ReadFigures& figures, io::IoEngine& io, TransferRing& ring) const {
  const std::vector<format::FileOffset> pieces = cold_pieces();
  if (pieces.empty()) return;
  double buffered_s = 0.0;
  double direct_s = 0.0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto& [file, offset] = pieces[i];
    // Buffered, direct, direct, buffered, ...: what changes steadily meanwhile is the same to both.
    const bool direct = (i + 1) / 2 % 2 == 1;
    const FileRange range{file, offset, options_.piece};
    const auto start = std::chrono::steady_clock::now();
    RangeSource source(files_, {&range, 1}, io, ring.buffer_bytes(), {.direct = direct});
    Taker sink([](const Piece&) { return nullptr; });
    copy(source, sink, ring);
    (direct ? direct_s : buffered_s) +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  const double gigabytes = static_cast<double>((options_.piece * options_.pieces).value) * 1e-9;
  if (buffered_s > 0.0) figures.buffered_gb_per_s = gigabytes / buffered_s;
  if (direct_s > 0.0) figures.direct_gb_per_s = gigabytes / direct_s;
}

ReadChoice ReadProbe::choose(ReadWay asked, io::IoEngine& io, TransferRing& ring) const {
  ReadFigures figures = look();
  if (wants_probe(asked, figures) && total_ >= options_.least) time_reads(figures, io, ring);
  return choose_read(asked, figures);
}

std::unique_ptr<io::Transfer> ExtentSink::take(const Piece& piece) {
  const Bytes stop = piece.offset + piece.bytes;
  for (; next_ < extents_.size(); ++next_) {
    const format::ManifestRange& extent = extents_[next_];
    if (extent.file != piece.file || extent.offset >= stop) break;
    const Bytes from = std::max(extent.offset, piece.offset);
    const Bytes to = std::min(end_of(extent), stop);
    if (from < to)
      take_elements_(next_, from - extent.offset,
                     piece.content.subspan((from - piece.offset).size(), (to - from).size()));
    if (end_of(extent) > stop) break;
  }
  return nullptr;
}

}  // namespace strata::checkpoint
