#include "strata/cli/config_check.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "strata/base/error.h"

namespace strata::cli {
namespace {

using engine::Verdict;
using Json = nlohmann::json;

struct Group {
  Verdict verdict;
  std::string_view name;   // in JSON
  std::string_view title;  // above the keys
};

// Keys that need the user's attention come last, where a terminal's output ends.
constexpr std::array<Group, 8> kGroups{{
    {Verdict::kHonoured, "honoured", "honoured"},
    {Verdict::kOwn, "own", "your own: no key of DeepSpeed or Strata"},
    {Verdict::kOff, "off", "off: the values ask for nothing"},
    {Verdict::kHint, "hint", "hint: accepted, without effect"},
    {Verdict::kOpen, "auto",
     "\"auto\": frameworks such as transformers' Trainer fill these in, and a script of your own "
     "must"},
    {Verdict::kOldSpelling, "old spelling", "old spelling: accepted"},
    {Verdict::kRefused, "refused", "refused: a feature that Strata does not have"},
    {Verdict::kWrong, "wrong", "wrong: mend it by hand"},
}};

constexpr std::size_t kColumns = 100;

// `text` in lines of at most kColumns, each behind `indent` blanks.
std::string wrapped(std::string_view text, std::size_t indent) {
  std::string result;
  std::string line;
  const auto end_line = [&] {
    if (!line.empty()) result += std::string(indent, ' ') + line + "\n";
    line.clear();
  };
  while (!text.empty()) {
    const auto space = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, space);
    if (!line.empty() && indent + line.size() + 1 + word.size() > kColumns) end_line();
    if (!line.empty()) line += ' ';
    line += word;
    text.remove_prefix(std::min(space + 1, text.size()));
  }
  end_line();
  return result;
}

std::string counts_of(const engine::ConfigReview& review) {
  std::string text;
  for (const Group& group : kGroups) {
    const std::size_t count = review.count(group.verdict);
    if (count > 0) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, group.name);
  }
  return text.empty() ? "no settings" : text;
}

std::string conclusion_of(const ConfigCheck& check) {
  const bool accepted = check.review.accepted();
  std::string text = fmt::format("{}: {}\n", check.request.config, counts_of(check.review));
  const bool open = check.review.count(Verdict::kOpen) > 0;
  text += !accepted ? "initialize refuses it\n"
          : open    ? "initialize takes it, once each \"auto\" is filled in\n"
                    : "initialize takes it\n";
  if (check.request.fix.empty()) {
    const std::size_t idle =
        check.review.count(Verdict::kOff) + check.review.count(Verdict::kOldSpelling);
    if (check.review.rewritten && (!accepted || idle > 0))
      text += "--fix OUT writes it in today's spelling, without what is refused or off\n";
  } else if (check.written) {
    text += fmt::format("written: {}, in today's spelling, without what is refused or off\n",
                        check.request.fix);
  } else {
    text +=
        fmt::format("not written: {}: first mend what only you can choose\n", check.request.fix);
  }
  return text;
}

// Whole or not at all: a reader of the old file may be the next one of the new.
void write_whole(const std::string& path, const std::string& text) {
  const std::string draft = path + ".draft";
  std::ofstream file(draft, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(draft, path, error);
  if (file && !error) return;
  std::filesystem::remove(draft, error);
  throw IoError(
      fmt::format("--fix: cannot write {}; name a file in a folder that you may write to", path));
}

}  // namespace

ConfigCheck check_config(const CheckRequest& request) {
  ConfigCheck check{request, engine::review_config(request.config)};
  if (!request.fix.empty() && check.review.rewritten) {
    write_whole(request.fix, engine::pretty_text(*check.review.rewritten));
    check.written = true;
  }
  return check;
}

std::string text_of(const ConfigCheck& check) {
  std::string text;
  for (const Group& group : kGroups) {
    if (check.review.count(group.verdict) == 0) continue;
    text += fmt::format("{}\n", group.title);
    for (const engine::Finding& finding : check.review.findings) {
      if (finding.verdict != group.verdict) continue;
      const std::string value = finding.value.empty() ? "" : " = " + finding.value;
      text += fmt::format("  {}{}\n", finding.path, value);
      text += wrapped(finding.reason, 6);
    }
    text += "\n";
  }
  return text + conclusion_of(check);
}

Json json_of(const ConfigCheck& check) {
  Json keys = Json::array();
  for (const engine::Finding& finding : check.review.findings) {
    std::string_view verdict;
    for (const Group& group : kGroups) {
      if (group.verdict == finding.verdict) verdict = group.name;
    }
    keys.push_back({{"key", finding.path},
                    {"value", finding.value},
                    {"verdict", verdict},
                    {"why", finding.reason}});
  }
  const auto& rewritten = check.review.rewritten;
  return {{"config", check.request.config},
          {"accepted", check.review.accepted()},
          {"keys", std::move(keys)},
          {"rewritten", rewritten ? Json(*rewritten) : Json()},
          {"written", check.written ? Json(check.request.fix) : Json()}};
}

}  // namespace strata::cli
