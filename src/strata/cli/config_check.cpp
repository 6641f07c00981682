#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "strata/base/error.h"
#include "strata/cli/commands.h"
#include "strata/engine/config/config_review.h"

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
  while (!text.empty()) {
    std::size_t end = text.size();
    if (indent + end > kColumns) end = text.rfind(' ', kColumns - indent);
    if (end == std::string_view::npos) end = std::min(text.find(' '), text.size());
    result += fmt::format("{:{}}{}\n", "", indent, text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
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

std::string conclusion_of(const CheckRequest& request, const engine::ConfigReview& review) {
  const bool accepted = review.accepted();
  std::string text = fmt::format("{}: {}\n", request.config, counts_of(review));
  const bool open = review.count(Verdict::kOpen) > 0;
  text += !accepted ? "initialize refuses it\n"
          : open    ? "initialize takes it, once each \"auto\" is filled in\n"
                    : "initialize takes it\n";
  if (!request.fix.empty()) {
    text += review.rewritten ? fmt::format(
                                   "written: {}, in today's spelling, without what is "
                                   "refused or off\n",
                                   request.fix)
                             : fmt::format("not written: {}: first mend what only you can choose\n",
                                           request.fix);
    return text;
  }
  const std::size_t idle = review.count(Verdict::kOff) + review.count(Verdict::kOldSpelling);
  if (review.rewritten && (!accepted || idle > 0))
    text += "--fix OUT writes it in today's spelling, without what is refused or off\n";
  return text;
}

}  // namespace

Report check_config(const CheckRequest& request) {
  const engine::ConfigReview review = engine::review_config(request.config);
  const auto& rewritten = review.rewritten;
  const bool written = !request.fix.empty() && rewritten;
  if (written) write_whole(request.fix, engine::pretty_text(*rewritten), "--fix");
  std::string text;
  for (const Group& group : kGroups) {
    if (review.count(group.verdict) == 0) continue;
    text += fmt::format("{}\n", group.title);
    for (const engine::Finding& finding : review.findings) {
      if (finding.verdict != group.verdict) continue;
      const std::string value = finding.value.empty() ? "" : " = " + finding.value;
      text += fmt::format("  {}{}\n", finding.path, value) + wrapped(finding.reason, 6);
    }
    text += "\n";
  }
  Json keys = Json::array();
  for (const engine::Finding& finding : review.findings)
    keys.push_back({{"key", finding.path},
                    {"value", finding.value},
                    {"verdict", std::ranges::find(kGroups, finding.verdict, &Group::verdict)->name},
                    {"why", finding.reason}});
  return {{{"config", request.config},
           {"accepted", review.accepted()},
           {"keys", std::move(keys)},
           {"rewritten", rewritten ? Json(*rewritten) : Json()},
           {"written", written ? Json(request.fix) : Json()}},
          text + conclusion_of(request, review),
          review.accepted()};
}

}  // namespace strata::cli
