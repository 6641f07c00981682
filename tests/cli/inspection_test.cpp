// Tests the output of `strata inspect` for a whole checkpoint, and that it names every defect.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command_run.h"
#include "cli/saved_checkpoint.h"
#include "strata/cli/commands.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

namespace fs = std::filesystem;

class Inspect : public ::testing::Test {
 protected:
  Inspect() : manifest_(saved_.write(folder_.path())) {}

  std::string file(std::size_t i) const { return home_ + "/" + manifest_.files[i].name; }

  TestFolder folder_;
  SavedCheckpoint saved_;
  format::Manifest manifest_;
  std::string home_ = folder_ / "global_step10";
};

TEST_F(Inspect, ShowsWhatIsInACheckpoint) {
  const CommandRun result = run({"inspect", home_});
  EXPECT_EQ(result.code, kDone) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("global_step10"), HasSubstr("10 (20 micro-steps, 1 skipped)"),
                    HasSubstr("1024.0"), HasSubstr("strata test"), HasSubstr("2 ranks at stage 3"),
                    HasSubstr("4 of 67 elements (3 bfloat16, 1 float32), 1 frozen, 1 tied"),
                    HasSubstr("exp_avg_sq"), HasSubstr("model-00001-of-00002.safetensors"),
                    HasSubstr("--verify reads every byte")));
}

TEST_F(Inspect, SaysTheSameAsJson) {
  const auto json = run({"inspect", folder_.path(), "--json", "--verify"}).json();
  EXPECT_EQ(json["tag"], "global_step10");
  EXPECT_EQ(json["latest"], "global_step10");
  EXPECT_EQ(json["global_steps"], 10);
  EXPECT_EQ(json["loss_scale"], 1024.0);
  EXPECT_EQ(json["world_size"], 2);
  EXPECT_EQ(json["parameters"]["elements"], 67);
  EXPECT_EQ(json["parameters"]["dtypes"]["bfloat16"], 3);
  EXPECT_EQ(json["buffers"]["tensors"], 1);
  EXPECT_EQ(json["kinds"][1]["kind"], "exp_avg");
  EXPECT_EQ(json["kinds"][1]["bytes"], 64 * 4);
  EXPECT_EQ(json["kinds"][0]["stored_as"]["int64"], 2);
  EXPECT_EQ(json["files"].size(), 4U);
  EXPECT_TRUE(json["verified"]);
  EXPECT_TRUE(json["whole"]);
}

TEST_F(Inspect, ListsTagsAndShowsTheLatest) {
  saved_.tag = "global_step9";
  saved_.write(folder_.path());  // `latest` names it
  fs::create_directory(folder_ / "global_step11");
  write_text(folder_ / "global_step11/model-00000-of-00002.safetensors", "cut off");
  const CommandRun result = run({"inspect", folder_.path()});
  EXPECT_THAT(result.out, HasSubstr("global_step10, global_step9 (latest)"));
  EXPECT_THAT(result.out, Not(HasSubstr("global_step11")));
}

TEST_F(Inspect, NamesEveryWrongBlockByFileBytesAndTensors) {
  const auto& last = manifest_.extents.back();
  flip_byte(file(0), 3);
  flip_byte(file(last.file), last.offset.value);
  const CommandRun result = run({"inspect", home_, "--verify"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.out, HasSubstr("WRONG: 2 findings"));
  EXPECT_THAT(result.out,
              HasSubstr("file 'model-00000-of-00002.safetensors': bytes [0, 64): is not what was "
                        "written; they belong to the header or the space between tensors"));
  EXPECT_THAT(result.out, AllOf(HasSubstr("'optimizer-00001-of-00002.safetensors'"),
                                HasSubstr("tensor 'layers.1.weight' (exp_avg_sq)")));
  const auto findings = run({"inspect", home_, "--verify", "--json"}).json()["findings"];
  ASSERT_EQ(findings.size(), 2U);
  EXPECT_EQ(findings[0]["begin"], 0);
  EXPECT_EQ(findings[0]["end"], 64);
  EXPECT_EQ(run({"inspect", home_}).code, kDone);  // sizes are right
}

TEST_F(Inspect, FindsEveryFlippedByte) {
  for (std::size_t f = 0; f < manifest_.files.size(); ++f) {
    for (std::int64_t at = 0; at < manifest_.files[f].bytes.value; at += 37) {
      flip_byte(file(f), at);
      EXPECT_EQ(run({"inspect", home_, "--verify"}).code, kFoundWrong) << f << " " << at;
      flip_byte(file(f), at);
    }
  }
  EXPECT_EQ(run({"inspect", home_, "--verify"}).code, kDone);
}

TEST_F(Inspect, JoinsWrongBlocksBesideEachOther) {
  write_text(file(1), std::string(manifest_.files[1].bytes.size(), 'x'));
  const auto findings = run({"inspect", home_, "--verify", "--json"}).json()["findings"];
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0]["end"], manifest_.files[1].bytes.value);
}

TEST_F(Inspect, NamesFilesThatAreMissingCutOffOrLinksOut) {
  fs::remove(file(0));
  fs::resize_file(file(1), 100);
  fs::rename(file(2), folder_ / "elsewhere");
  fs::create_symlink(folder_ / "elsewhere", file(2));
  for (const bool verify : {false, true}) {
    std::vector<std::string> arguments{"inspect", home_};
    if (verify) arguments.emplace_back("--verify");
    const CommandRun result = run(arguments);
    EXPECT_EQ(result.code, kFoundWrong);
    EXPECT_THAT(result.out, HasSubstr("lacks a file that its manifest names; is it copied wholly?: "
                                      "file='model-00000-of-00002.safetensors'"));
    EXPECT_THAT(result.out, HasSubstr("another size than when it was written; copy it again: "
                                      "file='optimizer-00000-of-00002.safetensors' wanted="));
    EXPECT_THAT(result.out, HasSubstr("found=100"));
    EXPECT_THAT(result.out, HasSubstr("is a link that leads out of its folder"));
    EXPECT_THAT(result.out, HasSubstr("WRONG: 3 findings"));
  }
}

TEST_F(Inspect, RefusesAManifestThatIsDamagedOrALinkOut) {
  std::string text = read_text(home_ + "/manifest.json");
  text.replace(text.find("\"stage\":3"), 9, "\"stage\":2");
  write_text(home_ + "/manifest.json", text);
  EXPECT_THAT(run({"inspect", home_}).err, HasSubstr("its checksum differs"));
  fs::rename(home_ + "/manifest.json", folder_ / "m");
  fs::create_symlink(folder_ / "m", home_ + "/manifest.json");
  EXPECT_THAT(run({"inspect", home_}).err, HasSubstr("a link that leads out of its folder"));
}

TEST_F(Inspect, SaysWhatIsNoCheckpoint) {
  CommandRun result = run({"inspect", folder_ / "nowhere"});
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, HasSubstr("there is no such folder"));
  EXPECT_EQ(run({"inspect", file(0)}).code, kUsage);
  EXPECT_THAT(run({"inspect", file(0)}).err, HasSubstr("is a file"));
  fs::remove(folder_ / "latest");
  result = run({"inspect", folder_.path()});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.err, AllOf(HasSubstr("neither manifest.json nor 'latest'"),
                                HasSubstr("checkpoints in it: global_step10")));
  write_text(folder_ / "latest", "global_step12\n");
  EXPECT_THAT(run({"inspect", folder_.path()}).err,
              AllOf(HasSubstr("'latest' names 'global_step12', which holds no manifest.json"),
                    HasSubstr("whole checkpoints beside it: global_step10")));
  write_text(folder_ / "latest", "../global_step10");
  EXPECT_THAT(run({"inspect", folder_.path()}).err,
              HasSubstr("names no checkpoint of its folder; found '../global_step10'"));
}

TEST_F(Inspect, ShowsNoControlBytesOfAManifest) {
  saved_.training = R"({"global_steps":"\u001b[2Jgone"})";
  saved_.write(folder_.path());
  EXPECT_THAT(run({"inspect", home_}).out,
              AllOf(HasSubstr(R"(\x1b[2Jgone)"), Not(HasSubstr("\x1b"))));
}

}  // namespace
}  // namespace strata::cli
