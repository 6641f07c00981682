#include "cli/saved_checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"
#include "strata/kernels/elementwise.h"

namespace strata::cli {
namespace {

struct Part {
  std::size_t tensor;
  std::size_t kind;
  DType dtype;
  Numel begin;
  Numel end;
};

std::vector<std::byte> bytes_of_part(const SavedCheckpoint& saved, const Part& part) {
  const auto count = (part.end - part.begin).size();
  std::vector<std::byte> bytes(bytes_of(part.end - part.begin, part.dtype).size());
  for (std::size_t i = 0; i < count; ++i) {
    const auto element = part.begin.value + static_cast<std::int64_t>(i);
    const float value = saved.value(saved.tensors[part.tensor].name, part.kind, element);
    if (part.dtype == DType::kInt64) {
      const auto integer = static_cast<std::int64_t>(value);
      std::memcpy(bytes.data() + i * sizeof(integer), &integer, sizeof(integer));
    } else {
      kernels::cast(bytes.data() + i * size_of(part.dtype).size(), part.dtype,
                    std::as_bytes(std::span(&value, 1)).data(), DType::kFloat32, Numel(1), nullptr);
    }
  }
  return bytes;
}

// The parts of the kinds [first, last) that rank `rank` writes.
std::vector<Part> parts_of(const SavedCheckpoint& saved, int rank, std::size_t first,
                           std::size_t last) {
  std::vector<Part> parts;
  for (std::size_t t = 0; t < saved.tensors.size(); ++t) {
    const SavedTensor& tensor = saved.tensors[t];
    const std::int64_t numel = format::checked_numel(tensor.shape)->value;
    const Numel begin(numel * rank / saved.ranks);
    const Numel end(numel * (rank + 1) / saved.ranks);
    for (std::size_t kind = first; kind < last; ++kind) {
      if (begin == end || (kind > 0 && !tensor.trainable)) continue;
      parts.push_back({t, kind, tensor.trainable ? DType::kFloat32 : tensor.dtype, begin, end});
    }
  }
  return parts;
}

void write_file(const SavedCheckpoint& saved, const std::string& folder, const std::string& name,
                const std::vector<Part>& parts, format::Manifest& manifest) {
  std::vector<format::TensorSpec> specs;
  for (const Part& part : parts)
    specs.push_back({fmt::format("{}.{}", part.tensor, part.kind),
                     part.dtype,
                     {(part.end - part.begin).value}});
  const format::SafetensorsLayout layout = format::lay_out_safetensors(specs, {});
  std::string text(layout.file_bytes.size(), '\0');
  text.replace(0, layout.head.size(), layout.head);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const auto bytes = bytes_of_part(saved, part);
    const Bytes offset = layout.tensors[i].offset;
    std::memcpy(text.data() + offset.size(), bytes.data(), bytes.size());
    manifest.extents.push_back(
        {part.tensor, part.kind, part.dtype, manifest.files.size(), offset, part.begin, part.end});
  }
  format::BlockChecksums sums(saved.block, {});
  sums.set(Bytes(), std::as_bytes(std::span(text)));
  manifest.files.push_back({name, layout.file_bytes, sums});
  write_text(folder + "/" + name, text);
}

}  // namespace

TestFolder::TestFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "strata_cli_XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw IoError("no folder for a test: " + pattern);
  path_ = pattern;
}

TestFolder::~TestFolder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

format::Manifest SavedCheckpoint::write(const std::string& folder) const {
  format::Manifest manifest;
  manifest.tag = tag;
  manifest.world_size = ranks;
  manifest.stage = 3;
  manifest.training = training;
  manifest.kinds = {std::string(format::kValue), "exp_avg", "exp_avg_sq"};
  for (const SavedTensor& t : tensors)
    manifest.tensors.push_back({t.name, t.role, t.shape, t.dtype, t.trainable, t.aliases});
  const std::string home = folder + "/" + tag;
  std::filesystem::create_directories(home);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto name = [&](const char* what) {
      return fmt::format("{}-{:05}-of-{:05}.safetensors", what, rank, ranks);
    };
    write_file(*this, home, name("model"), parts_of(*this, rank, 0, 1), manifest);
    write_file(*this, home, name("optimizer"), parts_of(*this, rank, 1, 3), manifest);
  }
  std::ranges::sort(manifest.extents, {}, [](const format::ManifestRange& extent) {
    return std::pair(extent.file, extent.offset);
  });
  write_text(home + "/manifest.json", to_text(manifest));
  write_text(folder + "/latest", tag);
  return manifest;
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string read_text(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void flip_byte(const std::string& path, std::int64_t offset) {
  std::string text = read_text(path);
  text.at(static_cast<std::size_t>(offset)) ^= 1;
  write_text(path, text);
}

}  // namespace strata::cli
