#include "strata/cli/host_list.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>

#include "strata/base/error.h"

namespace strata::cli {
namespace {

constexpr int kSlotsMax = 4096;

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (std::size_t end = 0; end != std::string_view::npos;) {
    end = text.find(at);
    parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(text.size(), parts.back().size() + 1));
  }
  return parts;
}

std::vector<std::string_view> words_of(std::string_view line) {
  std::vector<std::string_view> words;
  constexpr std::string_view kSpace = " \t\r";
  for (auto first = line.find_first_not_of(kSpace); first != std::string_view::npos;
       first = line.find_first_not_of(kSpace)) {
    line.remove_prefix(first);
    words.push_back(line.substr(0, line.find_first_of(kSpace)));
    line.remove_prefix(words.back().size());
  }
  return words;
}

std::optional<int> number_of(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

// What a filter names: hosts, each with slots, or all of them.
std::vector<Host> parse_filter(const std::vector<Host>& hosts, const std::string& filter,
                               const char* option) {
  std::vector<Host> named;
  for (const std::string_view part : split(filter, '@')) {
    const auto colon = part.find(':');
    const std::string name(part.substr(0, colon));
    const auto host = std::find_if(hosts.begin(), hosts.end(),
                                   [&](const Host& candidate) { return candidate.name == name; });
    if (host == hosts.end()) {
      std::vector<std::string> names;
      for (const Host& candidate : hosts) names.push_back(candidate.name);
      throw UsageError(
          fmt::format("{}: there is no host '{}'; wanted HOST[:SLOT,...][@HOST...] of {}", option,
                      name, fmt::join(names, ", ")));
    }
    named.push_back({name, host->slots});
    if (colon == std::string_view::npos) continue;
    named.back().slots.clear();
    for (const std::string_view text : split(part.substr(colon + 1), ',')) {
      const auto slot = number_of(text);
      const bool there = slot && std::count(host->slots.begin(), host->slots.end(), *slot) > 0;
      if (!there) {
        throw UsageError(fmt::format("{}: host '{}' has no slot '{}'; its slots are {}", option,
                                     name, text, fmt::join(host->slots, ",")));
      }
      named.back().slots.push_back(*slot);
    }
  }
  return named;
}

std::vector<int> without(const std::vector<int>& slots, const std::vector<int>& left_out) {
  std::vector<int> kept;
  for (const int slot : slots)
    if (std::count(left_out.begin(), left_out.end(), slot) == 0) kept.push_back(slot);
  return kept;
}

}  // namespace

std::vector<Host> parse_hostfile(std::string_view text, const std::string& path) {
  std::vector<Host> hosts;
  int number = 0;
  for (const std::string_view line : split(text, '\n')) {
    ++number;
    const auto words = words_of(line.substr(0, line.find('#')));
    if (words.empty()) continue;
    constexpr std::string_view kSlots = "slots=";
    const bool is_pair = words.size() == 2 && words[1].starts_with(kSlots);
    const auto slots = is_pair ? number_of(words[1].substr(kSlots.size())) : std::nullopt;
    if (!slots || *slots == 0 || *slots > kSlotsMax) {
      throw UsageError(
          fmt::format("{}:{}: wanted \"NAME slots=NUMBER\"; found '{}'", path, number, line));
    }
    Host host{std::string(words[0]), std::vector<int>(static_cast<std::size_t>(*slots))};
    std::iota(host.slots.begin(), host.slots.end(), 0);
    for (const Host& other : hosts) {
      if (other.name == host.name)
        throw UsageError(fmt::format("{}:{}: host '{}' is named twice", path, number, host.name));
    }
    hosts.push_back(std::move(host));
  }
  if (hosts.empty()) throw UsageError(fmt::format("{}: names no host", path));
  return hosts;
}

std::vector<Host> choose_hosts(const std::vector<Host>& hosts, const std::string& include,
                               const std::string& exclude) {
  if (!include.empty() && !exclude.empty())
    throw UsageError("--include and --exclude: give one of the two");
  std::vector<Host> named;
  if (!include.empty()) named = parse_filter(hosts, include, "--include");
  if (!exclude.empty()) named = parse_filter(hosts, exclude, "--exclude");
  std::vector<Host> chosen;
  for (const Host& host : hosts) {  // in the file's order, which ranks follow
    Host taken = host;
    if (!include.empty()) taken.slots.clear();
    for (const Host& part : named) {
      if (part.name != host.name) continue;
      const auto left = without(part.slots, taken.slots);  // of a host that is named twice
      if (include.empty()) {
        taken.slots = without(taken.slots, part.slots);
      } else {
        taken.slots.insert(taken.slots.end(), left.begin(), left.end());
      }
    }
    std::sort(taken.slots.begin(), taken.slots.end());
    if (!taken.slots.empty()) chosen.push_back(std::move(taken));
  }
  if (chosen.empty()) throw UsageError(fmt::format("--exclude {}: leaves no slot", exclude));
  return chosen;
}

}  // namespace strata::cli
