#include "strata/format/manifest.h"

#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/inside_folder.h"
#include "strata/format/manifest_check.h"
#include "strata/format/message_text.h"
#include "strata/io/file.h"
#include "strata/io/pending_range.h"

namespace strata::format {

std::string_view name_of(TensorRole role) {
  switch (role) {
    case TensorRole::kParameter:
      return "parameter";
    case TensorRole::kBuffer:
      return "buffer";
    case TensorRole::kRankBuffer:
      return "rank buffer";
    case TensorRole::kClient:
      return "client";
  }
  return "?";
}

bool is_plain_file_name(std::string_view name) {
  constexpr std::size_t kLongest = 200;
  if (name.empty() || name.size() > kLongest || name.front() == '.') return false;
  return std::ranges::none_of(name, [](char c) {
    return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
}

std::string owner_of_byte(const Manifest& manifest, std::size_t file, Bytes offset) {
  for (const ManifestRange& extent : manifest.extents) {
    const Bytes end = extent.offset + bytes_of(extent.end - extent.begin, extent.dtype);
    if (extent.file != file || offset < extent.offset || offset >= end) continue;
    return fmt::format("tensor {} ({})", in_quotes(manifest.tensors[extent.tensor].name),
                       manifest.kinds[extent.kind]);
  }
  return "the header or the space between tensors";
}

void append(Manifest& manifest, RankManifest part) {
  const std::size_t before = manifest.files.size();
  for (ManifestFile& file : part.files) manifest.files.push_back(std::move(file));
  for (ManifestRange& extent : part.extents) {
    extent.file += before;
    manifest.extents.push_back(extent);
  }
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kManifestName);
  require_inside(folder, path);
  const io::File file(path, io::File::Mode::kRead);
  const Bytes bytes = file.size();
  if (bytes > kManifestBytesMax) {
    throw FormatError(fmt::format(
        "the manifest of a checkpoint is larger than any may be: path={} found={} max={}", path,
        bytes.value, kManifestBytesMax.value));
  }
  std::string text(bytes.size(), '\0');
  io::read_fully(file, Bytes(0), std::as_writable_bytes(std::span(text)));
  return parse_manifest(text, path);
}

}  // namespace strata::format
