#include "strata/format/manifest_check.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/message_text.h"
#include "strata/format/tensor_info.h"

namespace strata::format {
namespace {

[[noreturn]] void fail(std::string_view path, const std::string& what) {
  throw FormatError(
      fmt::format("the manifest of a checkpoint is damaged: {}: path={}", what, path));
}

void check_names(const Manifest& manifest, std::string_view path) {
  std::set<std::string_view> kinds;
  for (const std::string& kind : manifest.kinds) {
    if (kind.empty() || !kinds.insert(kind).second)
      fail(path, fmt::format("the kind {} is empty or there twice", in_quotes(kind)));
  }
  if (manifest.kinds.empty() || manifest.kinds.front() != kValue)
    fail(path, "its first kind is not 'value'");
  std::set<std::pair<TensorRole, std::string_view>> names;
  for (const ManifestTensor& tensor : manifest.tensors) {
    if (!names.emplace(tensor.role, tensor.name).second)
      fail(path, fmt::format("tensor {} is there twice", in_quotes(tensor.name)));
    if (!checked_numel(tensor.shape))
      fail(path, fmt::format("tensor {} has no possible shape", in_quotes(tensor.name)));
  }
  std::set<std::string_view> files;
  for (const ManifestFile& file : manifest.files) {
    if (!is_plain_file_name(file.name) || !files.insert(file.name).second)
      fail(path, fmt::format("file {} lies outside of the folder or is there twice",
                             in_quotes(file.name)));
    if (!file.checksums.fits(file.bytes))
      fail(path, fmt::format("file {} of {} bytes has {} checksums of {} bytes each",
                             in_quotes(file.name), file.bytes.value, file.checksums.sums().size(),
                             file.checksums.block().value));
  }
}

void check_extent(const Manifest& manifest, const ManifestRange& extent, std::string_view path) {
  if (extent.tensor >= manifest.tensors.size() || extent.kind >= manifest.kinds.size() ||
      extent.file >= manifest.files.size()) {
    fail(path, "an extent is of a tensor, kind or file that is not there");
  }
  const ManifestTensor& tensor = manifest.tensors[extent.tensor];
  const ManifestFile& file = manifest.files[extent.file];
  const Numel numel = *checked_numel(tensor.shape);
  const bool within_tensor =
      extent.begin.value >= 0 && extent.begin < extent.end && extent.end <= numel;
  if (!within_tensor)
    fail(path,
         fmt::format("elements [{}, {}) of tensor {} are not among its {}", extent.begin.value,
                     extent.end.value, in_quotes(tensor.name), numel.value));
  const auto bytes = checked_bytes(extent.end - extent.begin, extent.dtype);
  if (!bytes || extent.offset.value < 0 || *bytes > file.bytes ||
      extent.offset > file.bytes - *bytes || extent.offset % size_of(extent.dtype) != Bytes()) {
    fail(path, fmt::format("elements [{}, {}) of tensor {} at {} do not fit file {} of {} bytes",
                           extent.begin.value, extent.end.value, in_quotes(tensor.name),
                           extent.offset.value, in_quotes(file.name), file.bytes.value));
  }
}

// One behind the other in a file, and one behind the other in a tensor.
void check_cover(const Manifest& manifest, std::string_view path) {
  std::map<std::pair<std::size_t, std::size_t>, std::vector<std::pair<Numel, Numel>>> parts;
  const ManifestRange* before = nullptr;
  for (const ManifestRange& extent : manifest.extents) {
    if (before != nullptr && before->file == extent.file &&
        before->offset + bytes_of(before->end - before->begin, before->dtype) > extent.offset) {
      fail(path, fmt::format("extents overlap in file {} at {}",
                             in_quotes(manifest.files[extent.file].name), extent.offset.value));
    }
    if (before != nullptr && before->file > extent.file) fail(path, "extents are not in order");
    parts[{extent.tensor, extent.kind}].emplace_back(extent.begin, extent.end);
    before = &extent;
  }
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t) {
    if (checked_numel(manifest.tensors[t].shape)->value > 0 && !parts.contains({t, 0}))
      fail(path, fmt::format("tensor {} has no values", in_quotes(manifest.tensors[t].name)));
  }
  for (auto& [key, ranges] : parts) {
    const ManifestTensor& tensor = manifest.tensors[key.first];
    std::ranges::sort(ranges);
    Numel at;
    for (const auto& [begin, end] : ranges) {
      if (begin != at)
        fail(path, fmt::format("tensor {} ({}) has elements twice or a hole at {}",
                               in_quotes(tensor.name), manifest.kinds[key.second],
                               std::min(begin, at).value));
      at = end;
    }
    if (at != *checked_numel(tensor.shape))
      fail(path, fmt::format("tensor {} ({}) ends at element {}", in_quotes(tensor.name),
                             manifest.kinds[key.second], at.value));
  }
}

}  // namespace

void check_manifest(const Manifest& manifest, std::string_view path) {
  if (manifest.world_size < 1 || manifest.stage < 0 || manifest.stage > 3)
    fail(path, fmt::format("a world size of {} at stage {}", manifest.world_size, manifest.stage));
  check_names(manifest, path);
  for (const ManifestRange& extent : manifest.extents) check_extent(manifest, extent, path);
  check_cover(manifest, path);
}

}  // namespace strata::format
