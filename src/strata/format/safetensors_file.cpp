#include "strata/format/safetensors_file.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <utility>

#include "strata/io/pending_range.h"

namespace strata::format {
namespace {

SafetensorsHeader read_header(const io::File& file) {
  const Bytes file_bytes = file.size();
  std::array<std::byte, kHeaderLengthBytes.size()> start{};
  const std::span<std::byte> there =
      std::span(start).first(std::min(start.size(), file_bytes.size()));
  io::read_fully(file, Bytes(0), there);
  std::string json(safetensors_header_bytes(there, file_bytes, file.path()).size(), '\0');
  io::read_fully(file, kHeaderLengthBytes, std::as_writable_bytes(std::span(json)));
  return parse_safetensors_header(json, file_bytes, file.path());
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path)
    : file_(std::move(path), io::File::Mode::kRead),
      header_(read_header(file_)),
      by_name_(header_.tensors.size()) {
  std::iota(by_name_.begin(), by_name_.end(), std::size_t{0});
  const auto before = [this](std::size_t a, std::size_t b) {
    return header_.tensors[a].name < header_.tensors[b].name;
  };
  if (!std::is_sorted(by_name_.begin(), by_name_.end(), before))
    std::sort(by_name_.begin(), by_name_.end(), before);
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [this](std::size_t i, std::string_view wanted) { return header_.tensors[i].name < wanted; });
  if (found == by_name_.end() || header_.tensors[*found].name != name) return nullptr;
  return &header_.tensors[*found];
}

}  // namespace strata::format
