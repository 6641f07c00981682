#include "strata/engine/unit/agreement.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <optional>
#include <sstream>

#include "strata/comm/agreement.h"
#include "strata/kernels/fingerprint.h"

namespace strata::engine {
namespace {

// A class of base/error.h, by the name that ranks exchange.
struct ErrorClass {
  std::string_view name;
  bool (*holds)(const std::exception& error);
  void (*raise)(const std::string& message);
};

template <typename Class>
constexpr ErrorClass error_class(std::string_view name) {
  return {name,
          [](const std::exception& error) { return dynamic_cast<const Class*>(&error) != nullptr; },
          [](const std::string& message) { throw Class(message); }};
}

constexpr ErrorClass kClasses[] = {
    error_class<ConfigError>("ConfigError"),
    error_class<FormatError>("FormatError"),
    error_class<IoError>("IoError"),
    error_class<CommError>("CommError"),
    error_class<OutOfMemoryError>("OutOfMemoryError"),
    error_class<DeviceError>("DeviceError"),
    error_class<UsageError>("UsageError"),
    error_class<NumericsError>("NumericsError"),
    error_class<InternalError>("InternalError"),
};

std::string kind_of(const std::exception& error) {
  for (const ErrorClass& each : kClasses) {
    if (each.holds(error)) return std::string(each.name);
  }
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? "OutOfMemoryError" : "Error";
}

[[noreturn]] void throw_as(const std::string& kind, const std::string& message) {
  for (const ErrorClass& each : kClasses) {
    if (each.name == kind) each.raise(message);
  }
  throw Error(message);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string line_or_end(const std::vector<std::string>& lines, std::size_t index) {
  return index < lines.size() ? "'" + lines[index] + "'" : "nothing (its list ends)";
}

// The text of a model with many thousand parameters is megabytes long; ranks compare fingerprints.
std::string digest_of(const std::string& text) {
  const kernels::Fingerprint sums =
      kernels::fingerprint(std::as_bytes(std::span(text)), /*pool=*/nullptr);
  return fmt::format("{} {:016x}{:016x}", text.size(), sums.first, sums.second);
}

}  // namespace

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return {kind_of(known), known.what()};
  } catch (...) {
    return {"Error", "an exception without a message"};
  }
}

void agree_on_outcome(comm::Collectives& collectives, std::string_view what, const Failure& mine) {
  const std::string text = mine.kind.empty() ? "" : mine.kind + "\n" + mine.message;
  const std::vector<std::string> all = collectives.all_gather_text(text);
  const std::optional<std::size_t> rank = comm::first_text(all);
  if (!rank) return;
  const std::string& first = all[*rank];
  const std::size_t line = first.find('\n');
  const std::string kind = first.substr(0, line);
  const std::string message = first.substr(line + 1);
  if (std::ranges::adjacent_find(all, std::not_equal_to()) == all.end()) throw_as(kind, message);
  throw_as(kind, fmt::format("{} failed on rank {}: {}", what, *rank, message));
}

void agree_on_text(comm::Collectives& collectives, const std::string& what,
                   const std::string& text) {
  if (collectives.world_size() == 1) return;
  const std::vector<std::string> digests = collectives.all_gather_text(digest_of(text));
  if (std::ranges::adjacent_find(digests, std::not_equal_to()) == digests.end()) return;
  const std::vector<std::string> texts = collectives.all_gather_text(text);
  std::vector<int> different;
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] != texts[0]) different.push_back(static_cast<int>(r));
  }
  if (different.empty()) return;
  const std::vector<std::string> first = lines_of(texts[0]);
  const std::vector<std::string> other =
      lines_of(texts[static_cast<std::size_t>(different.front())]);
  std::size_t i = 0;
  while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
  throw ConfigError(
      "the ranks have different {}s; every rank must build the same {}. First difference: rank 0 "
      "has {}, rank {} has {}. Ranks that differ from rank 0: {}",
      what, what, line_or_end(first, i), different.front(), line_or_end(other, i),
      fmt::join(different, ", "));
}

std::string text_of_numbers(std::span<const int> numbers) {
  return fmt::format("{}", fmt::join(numbers, " "));
}

std::vector<int> numbers_of_text(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<int>(words), std::istream_iterator<int>()};
}

}  // namespace strata::engine
