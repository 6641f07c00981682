#include "strata/format/weight_map.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"

namespace strata::format {
namespace {

// Everything in which a checkpoint fails a model, so that the user sees it in one message.
struct Misfits {
  std::vector<std::string> missing;
  std::vector<std::string> misshapen;
  std::vector<std::string> wrong_dtype;

  void throw_if_any(std::string_view origin) const {
    std::string text;
    const auto add = [&text](std::string_view what, std::span<const std::string> items) {
      if (!items.empty()) text += fmt::format("; {} {}: {}", items.size(), what, first_ten(items));
    };
    add("missing", missing);
    add("of another shape", misshapen);
    add("of a dtype that cannot be cast", wrong_dtype);
    if (text.empty()) return;
    throw FormatError("a checkpoint's tensors do not fit the model: path={}{}", origin, text);
  }
};

bool castable(DType from, DType to) {
  return from == to || (is_floating(from) && is_floating(to));
}

[[noreturn]] void fail_piece(const ParamSources& param, const SourceRange& piece,
                             std::string_view problem, Numel begin, Numel numel, Numel room) {
  throw UsageError(
      "the sources of a parameter do not fit it: {}: parameter={} source={} begin={} numel={} "
      "of={}",
      problem, in_quotes(param.name), in_quotes(piece.tensor), begin.value, numel.value,
      room.value);
}

// Is [begin, begin + numel) within [0, room)?
bool within(Numel begin, Numel numel, Numel room) {
  return begin.value >= 0 && numel.value >= 0 && begin <= room && numel <= room - begin;
}

Numel numel_of(const ParamSources& param) {
  const auto numel = checked_numel(param.shape);
  if (!numel)
    throw UsageError(
        "a parameter's shape is negative or does not fit 63 bits: parameter={} shape={}",
        in_quotes(param.name), shape_text(param.shape));
  return *numel;
}

// The copy that a piece of params[index] asks for, its tensor being found and of the right shape.
RangeCopy copy_of(const ParamSources& param, std::size_t index, const SourceRange& piece,
                  const CheckpointTensor& source, Numel param_numel) {
  const Numel rest = source.info.numel - piece.source_begin;
  const Numel numel = piece.numel.value_or(rest);
  if (!within(piece.source_begin, numel, source.info.numel))
    fail_piece(param, piece, "a piece goes beyond its source", piece.source_begin, numel,
               source.info.numel);
  if (!within(piece.destination, numel, param_numel))
    fail_piece(param, piece, "a piece goes beyond the parameter", piece.destination, numel,
               param_numel);
  const Bytes skipped = bytes_of(piece.source_begin, source.info.dtype);
  return {source.file, source.info.offset + skipped, source.info.dtype, index, piece.destination,
          numel};
}

// Sorted copies must tile [0, numel).
void demand_tiling(const ParamSources& param, std::span<const RangeCopy> copies, Numel numel) {
  Numel reached;
  const auto fail = [&](std::string_view problem, Numel at) {
    throw UsageError(
        "the sources of a parameter do not fit it: {}: parameter={} shape={} element={} "
        "filled_before={}",
        problem, in_quotes(param.name), shape_text(param.shape), at.value, reached.value);
  };
  for (const RangeCopy& copy : copies) {
    if (copy.param_begin < reached) fail("an element is filled twice", copy.param_begin);
    if (copy.param_begin > reached) fail("an element is filled by none", reached);
    reached = copy.param_begin + copy.numel;
  }
  if (reached != numel) fail("an element is filled by none", reached);
}

}  // namespace

WeightMap::WeightMap(std::span<const ParamSources> params,
                     std::span<const CheckpointTensor> checkpoint, std::string_view origin)
    : copies_(params.size()) {
  std::unordered_map<std::string_view, std::size_t> number;
  for (std::size_t i = 0; i < checkpoint.size(); ++i) number.emplace(checkpoint[i].info.name, i);
  std::vector<bool> used(checkpoint.size(), false);
  Misfits misfits;
  for (std::size_t p = 0; p < params.size(); ++p) {
    const ParamSources& param = params[p];
    const Numel param_numel = numel_of(param);
    bool fits = true;
    for (const SourceRange& piece : param.pieces) {
      const auto misfit = [&](std::vector<std::string>& list, const std::string& how) {
        list.push_back(in_quotes(piece.tensor) + how);
        fits = false;
      };
      const auto found = number.find(piece.tensor);
      if (found == number.end()) {
        misfit(misfits.missing, "");
        continue;
      }
      used[found->second] = true;
      const CheckpointTensor& source = checkpoint[found->second];
      if (source.info.shape != piece.shape) {
        misfit(misfits.misshapen, fmt::format(" wanted={} found={}", shape_text(piece.shape),
                                              shape_text(source.info.shape)));
      } else if (!castable(source.info.dtype, param.dtype)) {
        misfit(misfits.wrong_dtype, fmt::format(" wanted={} found={}", name_of(param.dtype),
                                                name_of(source.info.dtype)));
      } else {
        const RangeCopy copy = copy_of(param, p, piece, source, param_numel);
        if (copy.numel.value > 0) copies_[p].push_back(copy);
      }
    }
    std::ranges::sort(copies_[p], {}, &RangeCopy::param_begin);
    if (fits) demand_tiling(param, copies_[p], param_numel);
  }
  misfits.throw_if_any(origin);
  for (std::size_t i = 0; i < checkpoint.size(); ++i) {
    if (!used[i]) unused_.push_back(checkpoint[i].info.name);
  }
}

std::vector<RangeCopy> WeightMap::intersect(std::span<const ParamRange> ranges) const {
  std::vector<RangeCopy> wanted;
  for (const ParamRange& range : ranges) {
    STRATA_ASSERT(range.param < copies_.size() && range.begin.value >= 0 &&
                  range.begin <= range.end);
    const std::vector<RangeCopy>& copies = copies_[range.param];
    const Numel param_numel =
        copies.empty() ? Numel(0) : copies.back().param_begin + copies.back().numel;
    STRATA_ASSERT(range.end <= param_numel);
    // The copies tile the parameter: the first that ends beyond `begin` is the first of interest.
    auto copy = std::ranges::partition_point(
        copies, [&](const RangeCopy& c) { return c.param_begin + c.numel <= range.begin; });
    for (; copy != copies.end() && copy->param_begin < range.end; ++copy) {
      const Numel begin = std::max(copy->param_begin, range.begin);
      const Numel end = std::min(copy->param_begin + copy->numel, range.end);
      if (begin >= end) continue;
      RangeCopy part = *copy;
      part.offset += bytes_of(begin - copy->param_begin, copy->source_dtype);
      part.param_begin = begin;
      part.numel = end - begin;
      wanted.push_back(part);
    }
  }
  std::ranges::sort(wanted, {},
                    [](const RangeCopy& c) { return std::tuple(c.file, c.offset, c.param); });
  return wanted;
}

FileOffset WeightMap::end_of(std::size_t param) const {
  STRATA_ASSERT(param < copies_.size());
  FileOffset end;
  for (const RangeCopy& copy : copies_[param])
    end = std::max(end, {copy.file, copy.offset + copy.bytes()});
  return end;
}

}  // namespace strata::format
