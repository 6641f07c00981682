#include "strata/comm/agreement.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>

#include "strata/comm/bulk_operation.h"

namespace strata::comm {

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
  throw CommError(
      fmt::format("rank {} cannot {}: {}", names.of(static_cast<int>(*rank)), what, errors[*rank]));
}

}  // namespace strata::comm
