#include "strata/plan/flat_layout.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::plan {

FlatLayout::FlatLayout(std::span<const ParamSpec> model, std::vector<int> param_indices,
                       DType dtype, int world_size)
    : dtype_(dtype), world_size_(world_size) {
  constexpr Bytes kAlignment = 256_B;
  STRATA_ASSERT(world_size >= 1);
  // In elements of the weights' dtype. Where gradients share the layout in a wider dtype they are
  // aligned all the better; in a narrower one (fp32 weights, reduced in 16 bits) to 128 bytes.
  Numel alignment(kAlignment / size_of(dtype));
  for (const int index : param_indices) {
    if (model[static_cast<std::size_t>(index)].states == StateForm::k8Bit)
      alignment = std::max(alignment, Numel(kBlock8));
  }
  Numel offset;
  slots_.reserve(param_indices.size());
  for (const int index : param_indices) {
    const ParamSpec& param = model[static_cast<std::size_t>(index)];
    STRATA_ASSERT(param.dtype == dtype);
    slots_.push_back({index, offset, param.numel()});
    used_ += param.numel();
    offset = align_up(offset + param.numel(), alignment);
  }
  padded_ = align_up(offset, alignment * world_size);
}

std::vector<ShardRange> FlatLayout::pieces(int rank) const {
  const Numel begin = shard() * rank;
  const Numel end = begin + shard();
  std::vector<ShardRange> result;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Numel low = std::max(begin, slots_[i].offset);
    const Numel high = std::min(end, slots_[i].end());
    if (low >= high) continue;
    result.push_back(
        {static_cast<int>(i), low - slots_[i].offset, high - slots_[i].offset, low - begin});
  }
  return result;
}

std::vector<ParamSegment> FlatLayout::segments(int rank, std::span<const ParamSpec> model) const {
  std::vector<ParamSegment> result;
  for (const ShardRange& piece : pieces(rank)) {
    const Slot& slot = slots_[static_cast<std::size_t>(piece.slot)];
    const int group = model[static_cast<std::size_t>(slot.param)].group;
    const Numel end = piece.shard_offset + (piece.param_end - piece.param_begin);
    if (!result.empty()) result.back().end = piece.shard_offset;
    result.push_back({slot.param, group, piece.shard_offset, end});
  }
  return result;
}

}  // namespace strata::plan
