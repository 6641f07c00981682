#include "strata/checkpoint/writer.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"

namespace strata::checkpoint {
FileLayout::FileLayout(std::string name, std::vector<TensorRange> parts) : name_(std::move(name)) {
  std::vector<format::TensorSpec> specs;
  for (const TensorRange& part : parts) {
    // For other readers of the file: one kind a prefix.
    const bool value = part.kind == format::kValue;
    specs.push_back(
        {value ? part.name : fmt::format("{}:{}", part.kind, part.name), part.dtype, part.shape});
  }
  format::SafetensorsLayout layout =
      format::lay_out_safetensors(specs, {{"format", "strata-checkpoint"}});
  head_ = std::move(layout.head);
  bytes_ = layout.file_bytes;
  std::vector<std::size_t> order(parts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return layout.tensors[i].offset; });
  for (const std::size_t i : order) {
    offsets_.push_back(layout.tensors[i].offset);
    parts_.push_back(std::move(parts[i]));
  }
}

std::vector<format::ManifestRange> FileLayout::extents(std::span<const std::string> kinds,
                                                       std::size_t file) const {
  std::vector<format::ManifestRange> extents;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const TensorRange& part = parts_[i];
    const auto kind = std::ranges::find(kinds, part.kind);
    STRATA_ASSERT(kind != kinds.end());
    extents.push_back({part.tensor, static_cast<std::size_t>(kind - kinds.begin()), part.dtype,
                       file, offsets_[i], part.begin, part.end});
  }
  return extents;
}

void FileLayout::fill(Bytes offset, std::span<std::byte> target, const FillPart& fill_part) const {
  const Bytes end = offset + Bytes(target.size());
  STRATA_ASSERT(offset.value >= 0 && end <= bytes_);
  // Bytes between parts are zero. The host writes them at once: nothing that is queued writes this
  // memory yet.
  Bytes at = offset;
  const auto zero_until = [&](Bytes until) {
    if (at < until) std::memset(target.data() + (at - offset).size(), 0, (until - at).size());
  };
  const Bytes head(head_.size());
  if (offset < head) {
    at = std::min(head, end);
    std::memcpy(target.data(), head_.data() + offset.size(), (at - offset).size());
  }
  auto next = static_cast<std::size_t>(std::upper_bound(offsets_.begin(), offsets_.end(), offset) -
                                       offsets_.begin());
  if (next > 0) --next;  // it may reach into the range
  for (; next < parts_.size() && offsets_[next] < end; ++next) {
    const TensorRange& part = parts_[next];
    const Bytes begin = offsets_[next];
    const Bytes low = std::max(begin, offset);
    const Bytes high = std::min(begin + bytes_of(part.end - part.begin, part.dtype), end);
    if (low >= high) continue;
    zero_until(low);
    fill_part(next, low - begin, target.subspan((low - offset).size(), (high - low).size()));
    at = high;
  }
  zero_until(end);
}

bool WholeFile::next(Piece& piece) {
  piece.offset = at_;
  piece.bytes = std::min(most_, file_ - at_);
  at_ += piece.bytes;
  return piece.bytes > Bytes();
}

// One file, written from its first byte to its last.
struct FileWriter::File final : public Sink {
  File(const std::string& folder, const FileLayout& layout, io::IoEngine& the_io,
       io::FolderCalls& calls)
      : io(the_io),
        entry{layout.name(), layout.bytes(),
              format::BlockChecksums(format::BlockChecksums::block_for(layout.bytes()), {})},
        file(calls.create(fmt::format("{}/{}", folder, layout.name())).direct()) {
    calls.reserve(file, layout.bytes());
  }
  std::unique_ptr<io::Transfer> take(const Piece& piece) override {
    const Bytes end = piece.offset + piece.bytes;
    STRATA_ASSERT(end == entry.bytes || end % entry.checksums.block() == Bytes());
    entry.checksums.set(piece.offset, piece.content);
    return io.write(file, piece.offset, piece.content);
  }

  io::IoEngine& io;
  format::ManifestFile entry;
  io::File file;
};

FileWriter::FileWriter(const std::string& folder, std::span<const FileLayout> layouts,
                       io::IoEngine& io, io::FolderCalls& calls)
    : calls_(calls), layouts_(layouts) {
  for (const FileLayout& layout : layouts_)
    files_.push_back(std::make_unique<File>(folder, layout, io, calls));
}

FileWriter::~FileWriter() = default;

void FileWriter::write(Source& source, TransferRing& ring) {
  std::unique_ptr<File>& next = files_[part_.files.size()];
  copy(source, *next, ring, {.taking = ring.size() / 2});
  calls_.sync_file(next->file);
  calls_.open_to_others(next->file);
  part_.files.push_back(std::move(next->entry));
  next.reset();
}

format::RankManifest FileWriter::finish(std::span<const std::string> kinds) {
  STRATA_ASSERT(part_.files.size() == layouts_.size());
  for (std::size_t i = 0; i < layouts_.size(); ++i) {
    for (const format::ManifestRange& extent : layouts_[i].extents(kinds, i))
      part_.extents.push_back(extent);
  }
  return std::move(part_);
}

Bytes blocks_of(Bytes buffer, std::span<const FileLayout> layouts) {
  for (const FileLayout& layout : layouts)
    buffer = align_up(buffer, format::BlockChecksums::block_for(layout.bytes()));
  return buffer;
}

namespace {

constexpr RingOptions kWholeRing{2, 4_MiB};

std::span<const std::byte> read_part(const TensorRange& part, std::span<const WholeTensor> tensors,
                                     const ReadWhole& read) {
  const WholeTensor& tensor = tensors[part.tensor];
  const auto kind =
      std::ranges::find(tensor.kinds, part.kind, &std::pair<std::string, DType>::first);
  const auto bytes = read(part.tensor, static_cast<std::size_t>(kind - tensor.kinds.begin()));
  const Bytes wanted = bytes_of(part.end - part.begin, part.dtype);
  if (Bytes(bytes.size()) == wanted) return bytes;
  throw UsageError("a tensor has another size than was declared: tensor={} ({}) wanted={} found={}",
                   format::in_quotes(tensor.tensor.name), part.kind, wanted.value, bytes.size());
}

// The layouts of values, and of what is kept beside them.
std::vector<FileLayout> layouts_of(std::span<const WholeTensor> tensors) {
  std::vector<TensorRange> values;
  std::vector<TensorRange> kept;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const format::ManifestTensor& tensor = tensors[t].tensor;
    const std::optional<Numel> numel = format::checked_numel(tensor.shape);
    const bool parameter = tensor.role == format::TensorRole::kParameter;
    const std::string name =
        parameter ? tensor.name : fmt::format("{}:{}", name_of(tensor.role), tensor.name);
    for (const auto& [kind, dtype] : tensors[t].kinds) {
      if (numel == Numel()) continue;  // there is nothing to write of it
      (kind == format::kValue ? values : kept)
          .push_back({t, kind == format::kValue ? name : tensor.name, kind, dtype, Numel(),
                      numel.value_or(Numel(-1)), tensor.shape});
    }
  }
  std::vector<FileLayout> layouts;
  if (!values.empty()) layouts.emplace_back("model-00000-of-00001.safetensors", std::move(values));
  if (!kept.empty()) layouts.emplace_back("optimizer-00000-of-00001.safetensors", std::move(kept));
  return layouts;
}

}  // namespace

void write_whole(const WholeCheckpoint& checkpoint, const ReadWhole& read, io::IoEngine& io,
                 io::FolderCalls& calls) {
  require_tag(checkpoint.tag);
  format::Manifest manifest;
  manifest.tag = checkpoint.tag;
  manifest.training = checkpoint.training;
  manifest.world_size = checkpoint.world_size;
  manifest.stage = checkpoint.stage;
  manifest.kinds = {std::string(format::kValue)};
  for (const WholeTensor& tensor : checkpoint.tensors) {
    STRATA_ASSERT(!tensor.kinds.empty() && tensor.kinds.front().first == format::kValue);
    manifest.tensors.push_back(tensor.tensor);
    for (const auto& [kind, dtype] : tensor.kinds) {
      if (std::ranges::find(manifest.kinds, kind) == manifest.kinds.end())
        manifest.kinds.push_back(kind);
    }
  }
  NewCheckpoint made(checkpoint.folder, checkpoint.tag, calls);
  const std::vector<FileLayout> layouts = layouts_of(checkpoint.tensors);
  FileWriter writer(made.staging(), layouts, io, calls);
  TransferRing ring({kWholeRing.buffers, blocks_of(kWholeRing.buffer_bytes, layouts)}, nullptr);
  for (const FileLayout& layout : layouts) {
    std::optional<std::size_t> open;  // the part whose bytes are there
    std::span<const std::byte> bytes;
    const auto fill_part = [&](std::size_t part, Bytes at, std::span<std::byte> target) {
      if (open != part) bytes = read_part(layout.parts()[part], checkpoint.tensors, read);
      open = part;
      std::ranges::copy(bytes.subspan(at.size(), target.size()), target.begin());
    };
    WholeFile source(layout.bytes(), ring.buffer_bytes(),
                     [&](Bytes at, auto target) { layout.fill(at, target, fill_part); });
    writer.write(source, ring);
  }
  append(manifest, writer.finish(manifest.kinds));
  made.publish(manifest, checkpoint.publish, io);
}

}  // namespace strata::checkpoint
