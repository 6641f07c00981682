#include "strata/engine/checkpoint/shard_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "strata/base/error.h"
#include "strata/format/safetensors_layout.h"

namespace strata::engine {
namespace {

// Names in the file, for whoever opens it with another reader: one kind a prefix.
format::TensorSpec spec_of(const FilePart& part) {
  const bool value = part.kind == format::kValue;
  return {value ? part.name : fmt::format("{}:{}", part.kind, part.name),
          part.dtype,
          {(part.end - part.begin).value}};
}

}  // namespace

ShardFile::ShardFile(std::string name, std::vector<FilePart> parts) : name_(std::move(name)) {
  std::vector<format::TensorSpec> specs;
  for (const FilePart& part : parts) specs.push_back(spec_of(part));
  format::SafetensorsLayout layout =
      format::lay_out_safetensors(specs, {{"format", "strata-checkpoint"}});
  head_ = std::move(layout.head);
  layout_bytes_ = layout.file_bytes;
  std::vector<std::size_t> order(parts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return layout.tensors[i].offset; });
  for (const std::size_t i : order) {
    offsets_.push_back(layout.tensors[i].offset);
    parts_.push_back(std::move(parts[i]));
  }
}

std::vector<format::ManifestExtent> ShardFile::extents(std::span<const std::string> kinds) const {
  std::vector<format::ManifestExtent> extents;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const FilePart& part = parts_[i];
    const auto kind = std::ranges::find(kinds, part.kind);
    STRATA_ASSERT(kind != kinds.end());
    extents.push_back({part.tensor, static_cast<std::size_t>(kind - kinds.begin()), part.dtype, 0,
                       offsets_[i], part.begin, part.end});
  }
  return extents;
}

void ShardFile::enqueue_fill(Bytes offset, std::span<std::byte> target, ShardStates& states,
                             device::Device& device) const {
  const Bytes end = offset + Bytes(target.size());
  STRATA_ASSERT(offset.value >= 0 && end <= layout_bytes_);
  // What no part has is zero. By the host, at once: nothing that is queued writes this memory yet.
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
    const FilePart& part = parts_[next];
    const Bytes begin = offsets_[next];
    const Bytes low = std::max(begin, offset);
    const Bytes high = std::min(begin + bytes_of(part.end - part.begin, part.dtype), end);
    if (low >= high) continue;
    zero_until(low);
    fill_part(part, low - begin, high - begin,
              target.subspan((low - offset).size(), (high - low).size()), states, device);
    at = high;
  }
  zero_until(end);
}

void ShardFile::fill_part(const FilePart& part, Bytes at, Bytes until, std::span<std::byte> target,
                          ShardStates& states, device::Device& device) const {
  if (const auto* const memory = std::get_if<const std::byte*>(&part.source)) {
    device.copy(target, {*memory + at.size(), (until - at).size()}, device.compute_stream());
    return;
  }
  const Bytes element = size_of(part.dtype);
  STRATA_ASSERT(at % element == Bytes() && until % element == Bytes());
  const auto& run = std::get<ShardRun>(part.source);
  states.enqueue_read(run.unit, part.kind, run.first + Numel(at / element),
                      Numel((until - at) / element), target);
}

}  // namespace strata::engine
