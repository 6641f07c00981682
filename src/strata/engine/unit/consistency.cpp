#include "strata/engine/unit/consistency.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <sstream>
#include <vector>

#include "strata/base/error.h"
#include "strata/kernels/fingerprint.h"

namespace strata::engine {
namespace {

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

void agree_on_text(comm::Collectives& collectives, const std::string& what,
                   const std::string& text) {
  if (collectives.world_size() == 1) return;
  const std::vector<std::string> digests = collectives.all_gather_text(digest_of(text));
  if (std::all_of(digests.begin(), digests.end(),
                  [&](const std::string& each) { return each == digests.front(); }))
    return;
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
      fmt::format("the ranks have different {}s; every rank must build the same {}. First "
                  "difference: rank 0 has {}, "
                  "rank {} has {}. Ranks that differ from rank 0: {}",
                  what, what, line_or_end(first, i), different.front(), line_or_end(other, i),
                  fmt::join(different, ", ")));
}

}  // namespace strata::engine
