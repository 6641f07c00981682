#include "strata/engine/unit/agreement.h"

#include <algorithm>
#include <new>
#include <optional>
#include <vector>

#include "strata/comm/agreement.h"

namespace strata::engine {
namespace {

// A class of base/error.h, as ranks tell each other of it.
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
  const auto same = std::count(all.begin(), all.end(), first);
  if (static_cast<std::size_t>(same) == all.size()) throw_as(kind, message);
  throw_as(kind, fmt::format("{} failed on rank {}: {}", what, *rank, message));
}

}  // namespace strata::engine
