// The sources of a configuration, and JSON as people write it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/config/parsing.h"
#include "strata/engine/config/config_text.h"

namespace strata::engine {
namespace {

using testing::HasSubstr;

class ConfigFile : public testing::Test {
 protected:
  ~ConfigFile() override { std::filesystem::remove(path_); }

  std::string write(const std::string& text) const {
    std::ofstream(path_) << text;
    return path_;
  }

  const std::string path_ = testing::TempDir() + "config_" +
                            testing::UnitTest::GetInstance()->current_test_info()->name() + ".json";
};

TEST_F(ConfigFile, IsReadByItsPath) {
  EXPECT_EQ(parsed(write(R"({"zero_optimization": {"stage": 2}})")).zero.stage, 2);
}

TEST_F(ConfigFile, NamesItselfAndTheLineOfAnError) {
  const auto message = refusal_of(write("{\n  \"zero_optimization\":\n  {\"stage\" 2}\n}"));
  EXPECT_THAT(message, HasSubstr(path_ + " is not JSON; correct line 3"));
}

TEST(ConfigSource, TakesUrlsafeBase64) {
  // {"zero_optimization":{"stage":3}}, with and without padding
  EXPECT_EQ(parsed("eyJ6ZXJvX29wdGltaXphdGlvbiI6eyJzdGFnZSI6M319").zero.stage, 3);
  // {"optimizer":{"type":"SGD"}}
  EXPECT_EQ(parsed("eyJvcHRpbWl6ZXIiOnsidHlwZSI6IlNHRCJ9fQ==").optimizer->torch_class, "SGD");
  EXPECT_EQ(parsed("eyJvcHRpbWl6ZXIiOnsidHlwZSI6IlNHRCJ9fQ").optimizer->torch_class, "SGD");
}

TEST(ConfigSource, SaysWhatItIsNot) {
  EXPECT_EQ(
      refusal_of("/no/such/ds.json"),
      "the configuration is neither JSON text, nor the path of a file that exists, nor JSON in "
      "base64; found \"/no/such/ds.json\"");
  EXPECT_THAT(refusal_of("  "), HasSubstr("the configuration is empty"));
  EXPECT_THAT(refusal_of("[1, 2]"), HasSubstr("wanted an object { ... } of settings; found [1,2]"));
  EXPECT_THAT(refusal_of("/"), HasSubstr("neither JSON text, nor the path"));
}

TEST(JsonText, MayHoldCommentsAndATrailingComma) {
  EXPECT_EQ(parsed(R"({
    // slashes, with "quotes" and { braces
    "zero_optimization": {"stage": 1,},  # hash
    /* a block
       of lines */
    "wandb": {"project": "http://not#a/*comment*/"},
  })")
                .zero.stage,
            1);
}

TEST(JsonText, RefusesAKeyGivenTwiceWithItsPath) {
  EXPECT_EQ(refusal_of(R"({"zero_optimization": {"stage": 1, "stage": 2}})"),
            "zero_optimization.stage: the key is given twice in the configuration; keep one of the "
            "two");
  EXPECT_THAT(refusal_of(R"({"bf16": {}, "bf16": {}})"), HasSubstr("bf16: the key is given twice"));
}

TEST(JsonText, ReadsThePythonTokens) {
  const auto value = parse_json_text("[Infinity, -Infinity, NaN, \"NaN\"]", "it");
  EXPECT_TRUE(std::isinf(value[0].get<double>()) && value[0] > 0.0);
  EXPECT_TRUE(std::isinf(value[1].get<double>()) && value[1] < 0.0);
  EXPECT_TRUE(std::isnan(value[2].get<double>()));
  EXPECT_EQ(value[3], "NaN");
  EXPECT_EQ(canonical_text(value), "[Infinity,-Infinity,NaN,\"NaN\"]");
}

TEST(JsonText, RefusesWhatIsTruncatedOrTooDeep) {
  EXPECT_THAT(refusal_of(R"({"zero_optimization": {"stage": 1)"), HasSubstr("is not JSON"));
  EXPECT_THAT(refusal_of(R"({"zero_optimization": "st)"), HasSubstr("is not JSON"));
  EXPECT_THAT(refusal_of("{\"a\": " + std::string(100'000, '[')),
              HasSubstr("deeper than 64 levels"));
  EXPECT_THAT(refusal_of("{} {}"), HasSubstr("is not JSON"));
  EXPECT_THAT(refusal_of("{\"a\": /* never closed"), HasSubstr("is not JSON"));
}

TEST(JsonText, RefusesATextThatIsNotUtf8) {
  EXPECT_THAT(refusal_of("{\"log_level\": \"\xff\xfe\"}"), HasSubstr("is not JSON"));
}

}  // namespace
}  // namespace strata::engine
