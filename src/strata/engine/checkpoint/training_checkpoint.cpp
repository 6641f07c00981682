#include "strata/engine/checkpoint/training_checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "strata/base/error.h"
#include "strata/checkpoint/reader.h"
#include "strata/engine/unit/agreement.h"
#include "strata/kernels/states8.h"
#include "strata/plan/update_rule.h"

namespace strata::engine {
namespace {

using format::Manifest;
using format::ManifestRange;
using format::TensorRole;

constexpr std::string_view kOpening = "opening the checkpoint";
constexpr checkpoint::RingOptions kWholeRing{2, 4_MiB};

// Compares tensors of a role with those that the model has. `find`: the tensor of a name.
template <typename Find>
UnlikeNames compare_with(const TrainingCheckpoint& checkpoint, TensorRole role,
                         std::span<const BufferSpec> model, Find&& find) {
  UnlikeNames unlike;
  std::set<std::string_view> known;
  const std::vector<format::ManifestTensor>& tensors = checkpoint.manifest().tensors;
  for (const auto& [name, shape] : model) {
    const std::optional<std::size_t> tensor = find(name);
    if (!tensor) {
      unlike.missing.push_back(name);
      continue;
    }
    const format::ManifestTensor& saved = tensors[*tensor];
    known.insert(role == TensorRole::kParameter ? saved.name : name);  // one may have an alias
    if (saved.shape != shape)
      unlike.misshapen.push_back(
          fmt::format("{}: {} in the model, {} in the checkpoint", name, shape, saved.shape));
  }
  for (const format::ManifestTensor& tensor : tensors) {
    if (tensor.role == role && !known.contains(tensor.name))
      unlike.unexpected.push_back(tensor.name);
  }
  return unlike;
}

}  // namespace

TrainingCheckpoint::TrainingCheckpoint(std::string path, format::Manifest manifest)
    : path_(std::move(path)), manifest_(std::move(manifest)) {
  const auto& tensors = manifest_.tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) by_name_[{tensors[i].role, tensors[i].name}] = i;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (const std::string& alias : tensors[i].aliases)
      by_name_.emplace(std::pair(tensors[i].role, alias), i);
  }
  for (std::size_t i = 0; i < manifest_.extents.size(); ++i) {
    const ManifestRange& e = manifest_.extents[i];
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
  agree_after(collectives, kOpening, [&] {
    if (collectives.rank() == 0) text = to_text(format::read_manifest(path));
  });
  std::string folder = collectives.all_gather_text(path).front();
  text = collectives.all_gather_text(text).front();
  format::Manifest manifest = format::parse_manifest(text, folder);
  return {std::move(folder), std::move(manifest)};
}

UnlikeNames compare(const TrainingCheckpoint& checkpoint, Engine& engine) {
  std::vector<BufferSpec> model;
  for (const plan::ParamSpec& param : engine.weights().params()) {
    if (param.known_first().value > 0) continue;  // its parameter is looked at with the first tile
    model.push_back({param.known_name(), param.known_shape()});
  }
  return compare_with(checkpoint, TensorRole::kParameter, model, [&](const std::string& name) {
    return checkpoint.find(TensorRole::kParameter, name);
  });
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
  return compare_with(checkpoint, TensorRole::kBuffer, buffers, [&](const std::string& name) {
    return find_buffer(checkpoint, name, rank, world_size);
  });
}

Bytes whole_bytes(const TrainingCheckpoint& checkpoint, std::size_t tensor, std::string_view kind) {
  Bytes bytes;
  for (const std::size_t i : checkpoint.extents(tensor, kind)) {
    const ManifestRange& e = checkpoint.manifest().extents[i];
    bytes += bytes_of(e.end - e.begin, e.dtype);
  }
  return bytes;
}

namespace {

// In the order of the files.
void read_stored(const TrainingCheckpoint& checkpoint, std::size_t tensor, io::IoEngine& io,
                 std::span<std::byte> target, std::string_view kind) {
  STRATA_ASSERT(Bytes(target.size()) == whole_bytes(checkpoint, tensor, kind));
  const Manifest& manifest = checkpoint.manifest();
  std::vector<ManifestRange> extents;  // by file and offset
  std::map<Numel, Bytes> places;       // in the target, by first element
  std::set<std::size_t> wanted;
  std::vector<checkpoint::FileRange> ranges;
  for (const std::size_t i : checkpoint.extents(tensor, kind)) {
    const ManifestRange& e = extents.emplace_back(manifest.extents[i]);
    wanted.insert(e.file);
    places[e.begin] = bytes_of(e.end - e.begin, e.dtype);
    ranges.push_back({e.file, e.offset, places[e.begin]});
  }
  Bytes sum;
  for (auto& [first, bytes] : places) sum += std::exchange(bytes, sum);
  const checkpoint::CheckpointFiles files(checkpoint.path(), manifest, wanted);
  const checkpoint::Verification verify = files.verification();
  checkpoint::ExtentSink sink(extents, [&](std::size_t extent, Bytes at, auto bytes) {
    const Bytes place = places.at(extents[extent].begin) + at;
    std::ranges::copy(bytes, target.subspan(place.size(), bytes.size()).begin());
  });
  const std::vector<checkpoint::ReadableFile> ways = files.readable();
  const std::vector<checkpoint::FileRange> blocks =
      checkpoint::whole_blocks(ranges, manifest.files);
  checkpoint::TransferRing ring(kWholeRing, nullptr);
  checkpoint::RangeSource source(ways, blocks, io, ring.buffer_bytes(),
                                 {.aligned = 16_B, .verify = &verify});
  copy(source, sink, ring);
}

}  // namespace

void read_whole(const TrainingCheckpoint& checkpoint, std::size_t tensor, io::IoEngine& io,
                std::span<std::byte> target, std::string_view kind) {
  read_stored(checkpoint, tensor, io, target, kind);
  const format::ManifestTensor& of = checkpoint.manifest().tensors[tensor];
  if (!of.channels_last || target.empty()) return;
  const std::size_t first = checkpoint.extents(tensor, kind).front();
  plan::reorder(target, of.shape, size_of(checkpoint.manifest().extents[first].dtype),
                /*channels_last=*/false);
}

void read_decoded(const TrainingCheckpoint& checkpoint, std::size_t tensor, io::IoEngine& io,
                  std::span<float> target, const std::string& kind) {
  const std::string of_scales = kind + std::string(format::kScales);
  std::vector<std::uint8_t> codes(target.size());
  std::vector<float> scales(kernels::blocks8(target.size()));
  read_stored(checkpoint, tensor, io, std::as_writable_bytes(std::span(codes)), kind);
  read_stored(checkpoint, tensor, io, std::as_writable_bytes(std::span(scales)), of_scales);
  const bool second = kind == plan::kExpAvgSq;
  kernels::decode8(second ? kernels::unsigned_map8() : kernels::signed_map8(),
                   {codes.data(), scales.data()}, target);
  const format::ManifestTensor& of = checkpoint.manifest().tensors[tensor];
  if (of.channels_last)
    plan::reorder(std::as_writable_bytes(target), of.shape, 4_B,
                  /*channels_last=*/false);
}

}  // namespace strata::engine
