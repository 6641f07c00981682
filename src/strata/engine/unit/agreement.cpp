#include "strata/engine/unit/agreement.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "strata/comm/agreement.h"

namespace strata::engine {
namespace {

template <typename Class>
bool is(const std::exception& error) {
  return dynamic_cast<const Class*>(&error) != nullptr;
}

std::string kind_of(const std::exception& error) {
  if (is<ConfigError>(error)) return "ConfigError";
  if (is<FormatError>(error)) return "FormatError";
  if (is<IoError>(error)) return "IoError";
  if (is<OutOfMemoryError>(error) || is<std::bad_alloc>(error)) return "OutOfMemoryError";
  if (is<UsageError>(error)) return "UsageError";
  if (is<NumericsError>(error)) return "NumericsError";
  if (is<InternalError>(error)) return "InternalError";
  return "Error";
}

[[noreturn]] void throw_as(const std::string& kind, const std::string& message) {
  if (kind == "ConfigError") throw ConfigError(message);
  if (kind == "FormatError") throw FormatError(message);
  if (kind == "IoError") throw IoError(message);
  if (kind == "OutOfMemoryError") throw OutOfMemoryError(message);
  if (kind == "UsageError") throw UsageError(message);
  if (kind == "NumericsError") throw NumericsError(message);
  if (kind == "InternalError") throw InternalError(message);
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

void agree(comm::Collectives& collectives, std::string_view what, const Failure& mine) {
  const std::string text = mine.kind.empty() ? "" : mine.kind + "\n" + mine.message;
  const std::vector<std::string> all = collectives.all_gather_text(text);
  const std::optional<std::size_t> rank = comm::first_to_say(all);
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
