#include "strata/engine/config/digest.h"

#include <algorithm>
#include <map>

namespace strata::engine {
namespace {

std::map<std::string, std::string> lines_of(std::string_view digest) {
  std::map<std::string, std::string> lines;
  while (!digest.empty()) {
    const auto end = std::min(digest.find('\n'), digest.size());
    const std::string_view line = digest.substr(0, end);
    const auto equals = std::min(line.find(" = "), line.size());
    lines.emplace(line.substr(0, equals), line.substr(std::min(equals + 3, line.size())));
    digest.remove_prefix(std::min(end + 1, digest.size()));
  }
  return lines;
}

}  // namespace

std::optional<Difference> first_difference(std::string_view left, std::string_view right) {
  if (left == right) return std::nullopt;
  const auto a = lines_of(left);
  const auto b = lines_of(right);
  std::map<std::string, std::string> paths = a;
  paths.insert(b.begin(), b.end());
  const auto value = [](const auto& lines, const std::string& path) {
    const auto found = lines.find(path);
    return found == lines.end() ? std::string("not set") : found->second;
  };
  for (const auto& [path, unused] : paths) {
    Difference difference{path, value(a, path), value(b, path)};
    if (difference.left != difference.right) return difference;
  }
  return std::nullopt;
}

}  // namespace strata::engine
