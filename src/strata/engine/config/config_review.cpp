#include "strata/engine/config/config_review.h"

#include <algorithm>
#include <cmath>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"
#include "strata/engine/config/config_text.h"
#include "strata/engine/config/settings.h"

namespace strata::engine {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kOptimizerType = "optimizer.type";

// Reads the classes that the sections name, beside the rows of the table.
void read_classes(Settings& settings, ConfigFindings& remarks) {
  const auto read = [&](std::string_view path, const auto& of_section) {
    const json type = settings.at(path);
    if (type.is_null()) return;
    try {
      of_section();
    } catch (const ConfigError& error) {
      std::erase_if(remarks.findings, [&](const Finding& f) { return f.path == path; });
      record_error(error, path, type, &remarks);
    }
  };
  read(kOptimizerType, [&] { read_optimizer(&settings, &remarks); });
  read("scheduler.type", [&] {
    if (!read_torch_scheduler(&settings, &remarks)) read_scheduler(&settings, &remarks);
  });
}

// Sections that become empty by it go, too.
void remove(ordered_json* document, std::string_view path) {
  ordered_json* holder = holder_of(document, path);
  if (holder == nullptr) return;
  holder->erase(std::string(leaf_of(path)));
  if (holder->empty() && !parent_of(path).empty()) remove(document, parent_of(path));
}

Finding* find(std::vector<Finding>& findings, std::string_view path) {
  const auto found = std::ranges::find_if(findings, [&](const Finding& f) {
    return f.path == path && f.verdict != Verdict::kOldSpelling;
  });
  return found == findings.end() ? nullptr : &*found;
}

// Finds remarks that need all settings together: contradictions, and settings without effect.
void look_at_all(const json& document, ConfigFindings& remarks) {
  Config config;
  try {
    config = Config::parse(canonical_text(document));
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    const auto colon = std::min(text.find(": "), text.size());
    const std::string path = text.substr(0, colon);
    Finding* finding = find(remarks.findings, path);
    if (finding == nullptr)
      finding = &remarks.findings.emplace_back(Finding{path, Verdict::kWrong, "", ""});
    finding->verdict = Verdict::kWrong;
    finding->reason = text.substr(std::min(colon + 2, text.size()));
    return;
  }
  for (const Hint& hint : config.hints) {
    Finding* finding = find(remarks.findings, hint.path);
    if (finding == nullptr || finding->verdict != Verdict::kHonoured) continue;
    finding->verdict = Verdict::kHint;
    finding->reason = hint.reason;
  }
  for (const OpenSetting& setting : config.open) {
    if (find(remarks.findings, setting.path) != nullptr) continue;
    const auto start = std::min(setting.path.size() + 2, setting.problem.size());
    remarks.findings.push_back({setting.path, Verdict::kOpen, "", setting.problem.substr(start)});
  }
}

}  // namespace

bool ConfigReview::accepted() const {
  return count(Verdict::kRefused) == 0 && count(Verdict::kWrong) == 0;
}

std::size_t ConfigReview::count(Verdict verdict) const {
  return static_cast<std::size_t>(
      std::ranges::count_if(findings, [&](const Finding& f) { return f.verdict == verdict; }));
}

ConfigReview review_config(std::string_view text_or_path) {
  ordered_json document = open_document(text_or_path);
  ConfigFindings remarks;
  remarks.collects = true;
  apply_aliases(&document, &remarks);
  Settings settings;
  read_settings(config_keys(), document, "", &settings, &remarks);
  read_classes(settings, remarks);

  ConfigReview review;
  bool startable = true;
  for (const Finding& finding : remarks.findings) {
    if (finding.verdict == Verdict::kWrong || finding.path == kOptimizerType)
      startable = startable && finding.verdict == Verdict::kHonoured;
    if (finding.verdict == Verdict::kRefused || finding.verdict == Verdict::kOff)
      remove(&document, finding.path);
  }
  if (startable) {
    look_at_all(document, remarks);
    startable = std::ranges::none_of(remarks.findings,
                                     [](const Finding& f) { return f.verdict == Verdict::kWrong; });
  }
  if (startable) review.rewritten = std::move(document);
  review.findings = std::move(remarks.findings);
  std::ranges::stable_sort(review.findings, {}, &Finding::path);
  return review;
}

std::string pretty_text(const ordered_json& value) {
  const auto text_of = [](const auto& self, const ordered_json& item,
                          const std::string& indent) -> std::string {
    if (item.is_number_float() && !std::isfinite(item.get<double>()))
      return canonical_text(json(item.get<double>()));
    if (!item.is_structured() || item.empty()) return item.dump();
    const bool in_one = item.is_array() && std::ranges::none_of(item, &ordered_json::is_structured);
    const std::string deeper = in_one ? "" : indent + "  ";
    std::string text;
    for (const auto& [name, member] : item.items()) {
      if (!text.empty()) text += in_one ? ", " : ",\n";
      text += deeper;
      if (item.is_object()) text += ordered_json(name).dump() + ": ";
      text += self(self, member, deeper);
    }
    if (!in_one) text = "\n" + text + "\n" + indent;
    return item.is_array() ? "[" + text + "]" : "{" + text + "}";
  };
  return text_of(text_of, value, "") + "\n";
}

}  // namespace strata::engine
