#include "strata/engine/checkpoint/reordering_sink.h"

#include <cstring>

#include "strata/base/error.h"

namespace strata::engine {

void add_wanted(std::vector<format::ParamRange>& ranges, const Weights& weights, std::size_t item,
                int param, bool reordered) {
  const auto [begin, end] = weights.owned_range(param);
  if (begin >= end) return;
  if (reordered) {
    ranges.push_back({item, Numel(), weights.param(param).numel()});
  } else {
    ranges.push_back({item, begin, end});
  }
}

void ReorderingSink::enqueue_store(std::size_t item, Numel begin, Numel numel,
                                   const std::byte* source, DType source_dtype) {
  const std::optional<Reordering> reordering = values_.reordering(item);
  if (!reordering) return values_.enqueue_store(item, begin, numel, source, source_dtype);
  const plan::ParamSpec& param = engine_.weights().param(reordering->param);
  const auto [place, is_new] = collected_.try_emplace(item, Collected{source_dtype, Numel(), {}});
  Collected& collected = place->second;
  if (is_new) collected.bytes.resize(bytes_of(param.numel(), source_dtype).size());
  if (collected.dtype != source_dtype) {
    throw UsageError(fmt::format(
        "the pieces of parameter '{}', which is channels_last, are of different dtypes in the "
        "files; convert them to one; found {} and {}",
        param.name, name_of(collected.dtype), name_of(source_dtype)));
  }
  std::memcpy(collected.bytes.data() + bytes_of(begin, source_dtype).size(), source,
              bytes_of(numel, source_dtype).size());
  collected.filled += numel;
  if (collected.filled < param.numel()) return;
  plan::reorder(collected.bytes, param.shape, size_of(source_dtype), reordering->channels_last);
  const auto [first, end] = engine_.weights().owned_range(reordering->param);
  queued_.push_back(std::move(collected.bytes));
  collected_.erase(place);
  values_.enqueue_store(item, first, end - first,
                        queued_.back().data() + bytes_of(first, source_dtype).size(), source_dtype);
}

void ReorderingSink::settle() {
  values_.settle();
  if (queued_.empty()) return;
  engine_.device().compute_stream().synchronize();
  queued_.clear();
}

}  // namespace strata::engine
