// The table itself: every row has the properties on which the parser and the page rely.
#include "strata/engine/config/key.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "engine/config/config_page.h"
#include "engine/config/parsing.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

std::vector<Key> all_rows() {
  std::vector<Key> rows(config_keys().begin(), config_keys().end());
  rows.insert(rows.end(), adam_keys().begin(), adam_keys().end());
  for (const auto type : kSchedulerTypes) {
    rows.insert(rows.end(), scheduler_keys(type).begin(), scheduler_keys(type).end());
  }
  return rows;
}

bool is_leaf(const Key& key) {
  return key.kind != Kind::kSection && key.kind != Kind::kSwitch;
}

TEST(KeyTable, HoldsEveryPathOnceAndItsSection) {
  std::set<std::string_view> seen;
  for (const Key& key : config_keys()) {
    EXPECT_TRUE(seen.insert(key.path).second) << key.path;
    const std::string_view section = parent_of(key.path);
    if (section.empty()) continue;
    const Key* row = find_key(config_keys(), section);
    ASSERT_NE(row, nullptr) << key.path;
    EXPECT_EQ(row->kind, Kind::kSection) << key.path;
  }
}

TEST(KeyTable, HasDefaultsThatItsOwnLimitsAllow) {
  for (const Key& key : all_rows()) {
    const json fallback = json::parse(key.fallback);
    if (!is_leaf(key) || fallback.is_null()) continue;
    EXPECT_EQ(check_value(key, fallback), fallback) << key.path;
  }
}

TEST(KeyTable, SaysWhyAHintHasNoEffectAndWhatToWriteForARefusal) {
  for (const Key& key : all_rows()) {
    EXPECT_FALSE(key.meaning.empty()) << key.path;
    EXPECT_EQ(key.note.empty(), has_effect(key.treatment)) << key.path;
  }
}

// {"a": {"b": value}} for "a.b".
json document_of(std::string_view path, json value) {
  for (; !path.empty(); path = parent_of(path)) {
    value = json{{std::string(leaf_of(path)), std::move(value)}};
  }
  return value;
}

TEST(KeyTable, AcceptsEveryKeyAtItsDefault) {
  for (const Key& key : config_keys()) {
    const json document = document_of(key.path, json::parse(key.fallback));
    EXPECT_EQ(refusal_of(document.dump()), "accepted") << document;
  }
}

TEST(KeyTable, RefusesAWrongTypeAtEveryKeyByItsPath) {
  for (const Key& key : config_keys()) {
    const bool takes_text = key.kind == Kind::kText || key.kind == Kind::kTexts;
    const json wrong = takes_text ? json(1) : json("\x01wrong");
    const std::string message = refusal_of(document_of(key.path, wrong).dump());
    EXPECT_EQ(message.substr(0, key.path.size() + 2), std::string(key.path) + ": ") << message;
    EXPECT_NE(message.find("; found "), std::string::npos) << message;
  }
}

TEST(Nearest, CountsEditsAndSwapsWithoutCase) {
  EXPECT_EQ(edit_distance("stage", "stage"), 0);
  EXPECT_EQ(edit_distance("Stage", "sTAGE"), 0);
  EXPECT_EQ(edit_distance("porject", "project"), 1);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  const std::vector<std::string_view> known{"alpha", "beta"};
  EXPECT_EQ(nearest_of("bate", known), "beta");
  EXPECT_EQ(nearest_of("x", {}), "");
}

TEST(ConfigPage, IsTheOneInTheRepository) {
  std::ifstream file(STRATA_CONFIG_PAGE);
  ASSERT_TRUE(file) << STRATA_CONFIG_PAGE;
  std::ostringstream page;
  page << file.rdbuf();
  EXPECT_TRUE(page.str() == render_config_page())
      << "docs/CONFIG.md is out of date; write it again: ninja strata_config_doc, then "
         "strata_config_doc docs/CONFIG.md";
}

}  // namespace
}  // namespace strata::engine
