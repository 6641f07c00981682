#include "strata/comm/agreement.h"

#include <fmt/core.h>

#include <functional>

namespace strata::comm {
namespace {

constexpr std::string_view kDeparture = "has left: ";

std::span<std::byte> part_of(const SharedBuffer* buffer, Bytes offset, Bytes bytes,
                             const std::string& what) {
  if (buffer == nullptr) throw UsageError("{} needs a buffer; got none", what);
  const std::span<std::byte> whole = const_cast<SharedBuffer*>(buffer)->local();
  if (offset < Bytes() || offset + bytes > Bytes(whole.size()))
    throw UsageError("{} needs {} bytes of buffer '{}', which has {}", what, (offset + bytes).value,
                     buffer->name(), whole.size());
  return whole.subspan(offset.size(), bytes.size());
}

}  // namespace

BulkOperation describe_gather(const SliceMap& slices, std::span<std::byte> flat, int rank,
                              int world_size, std::string_view tag) {
  if (Bytes(flat.size()) != slices.slice_bytes * world_size)
    throw UsageError(
        "the target of the all-gather of '{}' must hold {} slices of {} bytes; it has {}", tag,
        world_size, slices.slice_bytes.value, flat.size());
  BulkOperation operation;
  operation.what =
      fmt::format("all-gather of '{}' ({} bytes a rank)", tag, slices.slice_bytes.value);
  if (slices.buffer == nullptr) {
    operation.source = flat.subspan((slices.slice_bytes * rank).size(), slices.slice_bytes.size());
    return operation;
  }
  operation.source = part_of(slices.buffer, slices.first_offset + slices.stride * rank,
                             slices.slice_bytes, operation.what);
  return operation;
}

BulkOperation describe_reduction(const Reduction& reduction, int world_size, std::string_view tag) {
  const auto numel = static_cast<std::int64_t>(reduction.result.size());
  BulkOperation operation;
  operation.what =
      fmt::format("reduction of '{}' ({} {} a rank)", tag, numel, name_of(reduction.dtype));
  if (!is_floating(reduction.dtype) || reduction.dtype == DType::kFloat64)
    throw UsageError("{} must be of float32, bfloat16 or float16", operation.what);
  operation.source = part_of(reduction.source, reduction.source_offset,
                             bytes_of(Numel(numel * world_size), reduction.dtype), operation.what);
  return operation;
}

BulkOperation describe_exchange(const Exchange& exchange, int rank, int world_size,
                                std::string_view tag) {
  const Parcels& parcels = *exchange.parcels;
  BulkOperation operation;
  operation.what = fmt::format("exchange of '{}' ({} bytes in all, parcels {:08x})", tag,
                               parcels.total().value, parcels.fingerprint());
  if (parcels.ranks() != world_size)
    throw UsageError("{} is for {} ranks; it has parcels for {}", operation.what, world_size,
                     parcels.ranks());
  if (Bytes(exchange.target.size()) != parcels.received(rank))
    throw UsageError("the target of the {} must hold {} bytes on rank {}; it has {}",
                     operation.what, parcels.received(rank).value, rank, exchange.target.size());
  operation.source = part_of(exchange.source, Bytes(), parcels.sent(rank), operation.what);
  return operation;
}

std::string describe_broadcast(Bytes bytes, int root, int world_size) {
  if (root < 0 || root >= world_size)
    throw UsageError("the root of a broadcast must be a rank, 0 to {}; got {}", world_size - 1,
                     root);
  return fmt::format("broadcast of {} bytes from rank {}", bytes.value, root);
}

void throw_foreign_buffer(std::string_view role, const SharedBuffer& buffer, std::string_view tag) {
  throw UsageError("the {} must be allocated by the same collectives ('{}' of '{}' is not)", role,
                   buffer.name(), tag);
}

std::string departure_text(std::string_view words) {
  return fmt::format("{}{}", kDeparture, words);
}

std::string different_operations(const std::vector<std::string>& whats, RankNames names) {
  std::string left;
  std::string others;
  for (std::size_t r = 0; r < whats.size(); ++r) {
    const int rank = names.of(static_cast<int>(r));
    if (whats[r].starts_with(kDeparture)) {
      left += fmt::format("{}rank {} has left: {}", left.empty() ? "" : "; ", rank,
                          whats[r].substr(kDeparture.size()));
    } else {
      others += fmt::format("{}rank {}: {}", others.empty() ? "" : "; ", rank, whats[r]);
    }
  }
  if (!left.empty()) return fmt::format("{} (meanwhile {})", left, others);
  std::string message = "the ranks do different things at the same time:";
  for (std::size_t r = 0; r < whats.size(); ++r)
    message += fmt::format(" rank {}: {};", names.of(static_cast<int>(r)), whats[r]);
  return message + " every rank must use the same units in the same order";
}

std::string description_of(const Collectives& collectives, const std::string& what) {
  return collectives.departure().empty() ? what : departure_text(collectives.departure());
}

std::vector<std::uint64_t> agree_on_operation(Collectives& control, const std::string& what,
                                              RankNames names, std::uint64_t number) {
  const auto hash = static_cast<double>(std::hash<std::string>{}(what) >> 12U);  // exact
  std::vector<double> values(static_cast<std::size_t>(control.world_size()) + 2);
  values[static_cast<std::size_t>(control.rank())] = static_cast<double>(number);
  const auto end = values.end();
  end[-2] = hash;
  end[-1] = -hash;
  // Numbers are not negative, so that each rank's own is the largest at its place.
  control.all_reduce(values, ReduceOp::kMax);
  if (end[-2] != -end[-1])
    throw CommError(
        different_operations(control.all_gather_text(description_of(control, what)), names));
  std::vector<std::uint64_t> numbers;
  for (auto value = values.begin(); value != end - 2; ++value)
    numbers.push_back(static_cast<std::uint64_t>(*value));
  return numbers;
}

std::optional<std::size_t> first_text(std::span<const std::string> texts) {
  const auto first = std::ranges::find_if(texts, [](const auto& text) { return !text.empty(); });
  if (first == texts.end()) return std::nullopt;
  return static_cast<std::size_t>(first - texts.begin());
}

void agree_all_can(std::span<const std::string> errors, std::string_view what, RankNames names) {
  const std::optional<std::size_t> rank = first_text(errors);
  if (!rank) return;
  throw CommError("rank {} cannot {}: {}", names.of(static_cast<int>(*rank)), what, errors[*rank]);
}

}  // namespace strata::comm
