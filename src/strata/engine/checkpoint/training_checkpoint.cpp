#include "strata/engine/checkpoint/training_checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/format/inside_folder.h"
#include "strata/format/message_text.h"
#include "strata/io/descriptor_limit.h"

namespace strata::engine {
namespace {

using format::Manifest;
using format::ManifestExtent;
using format::TensorRole;

constexpr std::string_view kOpening = "opening the checkpoint";
constexpr std::size_t kNamed = 12;  // names that a message lists
constexpr Bytes kWholePiece = 8_MiB;

std::string both_shapes(const std::string& name, const std::vector<std::int64_t>& model,
                        const std::vector<std::int64_t>& checkpoint) {
  return fmt::format("{}: {} in the model, {} in the checkpoint", name, model, checkpoint);
}

}  // namespace

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kNamed); ++i)
    text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kNamed) text += fmt::format(" and {} more", names.size() - kNamed);
  return text;
}

TrainingCheckpoint::TrainingCheckpoint(std::string path, format::Manifest manifest)
    : path_(std::move(path)), manifest_(std::move(manifest)) {
  const auto& tensors = manifest_.tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) by_name_[{tensors[i].role, tensors[i].name}] = i;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (const std::string& alias : tensors[i].aliases)
      by_name_.emplace(std::pair(tensors[i].role, alias), i);
  }
  for (std::size_t i = 0; i < manifest_.extents.size(); ++i) {
    const ManifestExtent& e = manifest_.extents[i];
    extents_[{e.tensor, manifest_.kinds[e.kind]}].push_back(i);
  }
}

std::optional<std::size_t> TrainingCheckpoint::find(TensorRole role,
                                                    const std::string& name) const {
  const auto found = by_name_.find({role, name});
  return found == by_name_.end() ? std::nullopt : std::optional(found->second);
}

const std::vector<std::size_t>& TrainingCheckpoint::extents(std::size_t tensor,
                                                            std::string_view kind) const {
  const auto found = extents_.find(std::pair(tensor, std::string(kind)));
  return found == extents_.end() ? none_ : found->second;
}

TrainingCheckpoint open_training(comm::Collectives& collectives, const std::string& path) {
  std::string text;
  together(collectives, kOpening, [&] {
    if (collectives.rank() == 0) text = to_text(format::read_manifest(path));
  });
  std::string folder = collectives.all_gather_text(path).front();
  text = collectives.all_gather_text(text).front();
  format::Manifest manifest = format::parse_manifest(text, folder);
  return {std::move(folder), std::move(manifest)};
}

UnlikeNames compare(const TrainingCheckpoint& checkpoint, Engine& engine) {
  UnlikeNames differences;
  std::set<std::size_t> used;
  const Weights& weights = engine.weights();
  for (int p = 0; p < weights.param_count(); ++p) {
    const plan::ParamSpec& param = weights.param(p);
    if (param.known_first().value > 0)
      continue;  // a tile: its parameter is looked at with the first
    const auto tensor = checkpoint.find(TensorRole::kParameter, param.known_name());
    if (!tensor) {
      differences.missing.push_back(param.known_name());
      continue;
    }
    used.insert(*tensor);
    const std::vector<std::int64_t>& shape = checkpoint.manifest().tensors[*tensor].shape;
    if (shape != param.known_shape()) {
      differences.misshapen.push_back(both_shapes(param.known_name(), param.known_shape(), shape));
    }
  }
  for (std::size_t i = 0; i < checkpoint.manifest().tensors.size(); ++i) {
    const format::ManifestTensor& tensor = checkpoint.manifest().tensors[i];
    if (tensor.role == TensorRole::kParameter && !used.contains(i))
      differences.unexpected.push_back(tensor.name);
  }
  return differences;
}

std::optional<std::size_t> find_buffer(const TrainingCheckpoint& checkpoint,
                                       const std::string& name, int rank, int world_size) {
  if (checkpoint.manifest().world_size == world_size) {
    const auto own = checkpoint.find(TensorRole::kRankBuffer, fmt::format("{}:{}", rank, name));
    if (own) return own;
  }
  return checkpoint.find(TensorRole::kBuffer, name);
}

UnlikeNames compare_buffers(const TrainingCheckpoint& checkpoint,
                            std::span<const BufferSpec> buffers, int rank, int world_size) {
  UnlikeNames differences;
  std::set<std::string> names;
  for (const BufferSpec& buffer : buffers) {
    names.insert(buffer.name);
    const auto tensor = find_buffer(checkpoint, buffer.name, rank, world_size);
    if (!tensor) {
      differences.missing.push_back(buffer.name);
      continue;
    }
    const std::vector<std::int64_t>& shape = checkpoint.manifest().tensors[*tensor].shape;
    if (shape != buffer.shape)
      differences.misshapen.push_back(both_shapes(buffer.name, buffer.shape, shape));
  }
  for (const format::ManifestTensor& tensor : checkpoint.manifest().tensors) {
    if (tensor.role == TensorRole::kBuffer && !names.contains(tensor.name))
      differences.unexpected.push_back(tensor.name);
  }
  return differences;
}

CheckpointFiles::CheckpointFiles(const TrainingCheckpoint& checkpoint,
                                 const std::set<std::size_t>& wanted)
    : checkpoint_(checkpoint), files_(checkpoint.manifest().files.size()) {
  io::allow_descriptors(wanted.size() * 2);  // each may be opened again, past the page cache
  for (const std::size_t place : wanted) {
    const format::ManifestFile& entry = checkpoint.manifest().files[place];
    const std::string path = fmt::format("{}/{}", checkpoint.path(), entry.name);
    format::require_inside(checkpoint.path(), path);
    const io::File& file = files_[place].emplace(path, io::File::Mode::kRead);
    if (file.size() != entry.bytes) {
      throw FormatError(fmt::format(
          "a file of a checkpoint has another size than it was written with; it is cut off or was "
          "replaced: path={} wanted={} found={}",
          file.path(), entry.bytes.value, file.size().value));
    }
  }
}

std::vector<const io::File*> CheckpointFiles::pointers() const {
  std::vector<const io::File*> all;
  for (const auto& file : files_) all.push_back(file ? &*file : nullptr);
  return all;
}

Bytes CheckpointFiles::block() const {
  Bytes largest = 1_B;
  for (const format::ManifestFile& entry : checkpoint_.manifest().files)
    largest = std::max(largest, entry.checksums.block());
  return largest;
}

void CheckpointFiles::look(std::size_t file, Bytes offset, std::span<const std::byte> bytes) const {
  const format::ManifestFile& entry = checkpoint_.manifest().files[file];
  const Bytes wrong = entry.checksums.first_wrong(offset, bytes);
  if (wrong.value < 0) return;
  throw FormatError(
      fmt::format("bytes of a checkpoint are not what was written (their checksum differs), of {}; "
                  "load another "
                  "checkpoint, or copy the file again: path={} begin={} end={}",
                  owners(file, wrong), at(file).path(), wrong.value,
                  std::min(wrong + entry.checksums.block(), entry.bytes).value));
}

// Tensors that lie in the block.
std::string CheckpointFiles::owners(std::size_t file, Bytes wrong) const {
  const Manifest& manifest = checkpoint_.manifest();
  const Bytes end = wrong + manifest.files[file].checksums.block();
  std::vector<std::string> names;
  for (const ManifestExtent& e : manifest.extents) {
    const Bytes behind = e.offset + bytes_of(e.end - e.begin, e.dtype);
    if (e.file != file || e.offset >= end || behind <= wrong) continue;
    names.push_back(fmt::format("tensor {} ({})",
                                format::in_quotes(manifest.tensors[e.tensor].name),
                                manifest.kinds[e.kind]));
  }
  return names.empty() ? "the header" : listed(names);
}

Bytes whole_bytes(const TrainingCheckpoint& checkpoint, std::size_t tensor, std::string_view kind) {
  Bytes bytes;
  for (const std::size_t i : checkpoint.extents(tensor, kind)) {
    const ManifestExtent& e = checkpoint.manifest().extents[i];
    bytes += bytes_of(e.end - e.begin, e.dtype);
  }
  return bytes;
}

void read_whole(const TrainingCheckpoint& checkpoint, std::size_t tensor, io::IoEngine& io,
                std::span<std::byte> target, std::string_view kind) {
  STRATA_ASSERT(Bytes(target.size()) == whole_bytes(checkpoint, tensor, kind));
  const Manifest& manifest = checkpoint.manifest();
  std::vector<std::size_t> extents = checkpoint.extents(tensor, kind);
  std::set<std::size_t> wanted;
  for (const std::size_t i : extents) wanted.insert(manifest.extents[i].file);
  const CheckpointFiles files(checkpoint, wanted);
  std::ranges::sort(extents, {}, [&](std::size_t i) { return manifest.extents[i].begin; });
  std::vector<std::byte> blocks;
  for (const std::size_t i : extents) {
    const ManifestExtent& e = manifest.extents[i];
    const format::ManifestFile& entry = manifest.files[e.file];
    const Bytes block = entry.checksums.block();
    const Bytes piece = align_up(kWholePiece, block);
    const Bytes end = e.offset + bytes_of(e.end - e.begin, e.dtype);
    for (Bytes at = e.offset - e.offset % block; at < end; at += piece) {
      blocks.resize((std::min({at + piece, align_up(end, block), entry.bytes}) - at).size());
      io.read(files.at(e.file), at, blocks)->wait();
      files.look(e.file, at, blocks);
      const Bytes low = std::max(at, e.offset);
      const Bytes high = std::min(at + Bytes(blocks.size()), end);
      const std::size_t count = (high - low).size();
      std::copy_n(blocks.begin() + (low - at).value, count, target.begin());
      target = target.subspan(count);
    }
  }
}

}  // namespace strata::engine
