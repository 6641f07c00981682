// `strata check`: its output about a configuration, for people and for programs, and the file that
// it writes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command_run.h"
#include "io/temporary_folder.h"
#include "strata/cli/commands.h"

namespace strata::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Check : public ::testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& text) const {
    return folder_.write(name, text);
  }
  std::string path(const std::string& name) const { return folder_ / name; }

 private:
  testing::TemporaryFolder folder_;
};

TEST_F(Check, ShowsWhatNeedsAHandLast) {
  const std::string config = file("ds.json", R"({"train_batch_size": 4, "bfloat16": {"enabled": 1},
      "prescale_gradients": true, "amp": {"enabled": false}, "elasticity": {"enabled": true}})");
  const CommandRun result = run({"check", config});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(result.out, R"(honoured
  bf16.enabled = 1
      turns bf16 on
  train_batch_size = 4
      samples of one step over all ranks = micro-batch x accumulation x world size; any two give the
      third

off: the values ask for nothing
  amp = {"enabled":false}
      mixed precision of NVIDIA apex

hint: accepted, without effect
  prescale_gradients = true
      the reduction divides in fp32

old spelling: accepted
  bfloat16 = {"enabled":1}
      write bf16

refused: a feature that Strata does not have
  elasticity = {"enabled":true}
      not supported (batch sizes that follow the world size); remove the section and set
      train_batch_size

)" + config + R"(: 2 honoured, 1 off, 1 hint, 1 old spelling, 1 refused
initialize refuses it
--fix OUT writes it in today's spelling, without what is refused or off
)");
}

TEST_F(Check, WritesAFileThatIsAccepted) {
  const std::string config = file("ds.json", R"({"train_batch_size": 4, "bfloat16": {"enabled": 1},
      "amp": {"enabled": true}})");
  const CommandRun fixed = run({"check", config, "--fix", path("out.json")});
  EXPECT_EQ(fixed.code, kFoundWrong) << "the file that was looked at asks for more than there is";
  EXPECT_THAT(fixed.out, HasSubstr("written: " + path("out.json")));
  EXPECT_EQ(testing::content_of(path("out.json")),
            "{\n  \"train_batch_size\": 4,\n  \"bf16\": {\n    \"enabled\": 1\n  }\n}\n");
  const CommandRun again = run({"check", path("out.json")});
  EXPECT_EQ(again.code, kDone);
  EXPECT_THAT(again.out, HasSubstr("out.json: 2 honoured\ninitialize takes it\n"));
  EXPECT_THAT(again.out, Not(HasSubstr("--fix")));
  EXPECT_EQ(run({"check", config, "--fix", config}).code, kFoundWrong);
  EXPECT_EQ(run({"check", config}).code, kDone) << "it may be written in its own place";
}

TEST_F(Check, WritesNothingThatItWouldHaveToInvent) {
  const std::string config = file("ds.json", R"({"optimizer": {"type": "OneBitAdam"}})");
  const CommandRun result = run({"check", config, "--fix", path("out.json"), "--json"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_FALSE(std::filesystem::exists(path("out.json")));
  EXPECT_TRUE(result.json()["written"].is_null());
  EXPECT_TRUE(result.json()["rewritten"].is_null());
  EXPECT_EQ(result.json()["accepted"], false);
  EXPECT_EQ(result.json()["keys"][0]["verdict"], "refused");
  EXPECT_THAT(run({"check", config, "--fix", path("out.json")}).out,
              HasSubstr("not written: " + path("out.json")));
}

TEST_F(Check, TellsAnOpenSettingFromAWrongOne) {
  const std::string config =
      file("ds.json", R"({"gradient_clipping": "auto", "zero_optimization": {"stagee": 2}})");
  const auto json = run({"check", config, "--json"}).json();
  EXPECT_EQ(json["keys"][0], (nlohmann::json{{"key", "gradient_clipping"},
                                             {"value", "\"auto\""},
                                             {"verdict", "auto"},
                                             {"why",
                                              "largest global L2 norm of the gradient; 0 "
                                              "does not clip"}}));
  EXPECT_EQ(json["keys"][1]["verdict"], "wrong");
}

TEST_F(Check, RefusesWhatIsNoConfiguration) {
  EXPECT_EQ(run({"check", path("nothing.json")}).code, kUsage);
  const CommandRun broken = run({"check", file("broken.json", "{\"a\": ")});
  EXPECT_EQ(broken.code, kUsage);
  EXPECT_THAT(broken.err, HasSubstr("broken.json is not JSON"));
  const CommandRun nowhere =
      run({"check", file("ds.json", "{}"), "--fix", path("no/folder/out.json")});
  EXPECT_EQ(nowhere.code, kFoundWrong);
  EXPECT_THAT(nowhere.err, HasSubstr("--fix: cannot write"));
}

}  // namespace
}  // namespace strata::cli
