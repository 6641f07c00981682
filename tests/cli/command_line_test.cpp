// Tests the help of the command line, and the small parts that commands share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command_run.h"
#include "strata/base/error.h"
#include "strata/cli/commands.h"
#include "strata/cli/console.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CommandLine, HelpTeaches) {
  const CommandRun all = run({"--help"});
  EXPECT_EQ(all.code, kDone);
  EXPECT_THAT(all.out, AllOf(HasSubstr("inspect"), HasSubstr("consolidate"), HasSubstr("diff"),
                             HasSubstr("plan"), HasSubstr("bench-io"),
                             HasSubstr("Exit codes: 0 done, 1 found wrong")));
  for (const char* command : {"inspect", "consolidate", "diff", "plan", "bench-io"}) {
    const CommandRun help = run({command, "--help"});
    EXPECT_EQ(help.code, kDone);
    EXPECT_THAT(help.out, AllOf(HasSubstr("Examples:\n  strata " + std::string(command)),
                                HasSubstr("--json")));
  }
  EXPECT_THAT(run({"--version"}).out, HasSubstr("strata 0."));
}

TEST(CommandLine, RefusesWhatItDoesNotKnow) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {},
           {"inspct"},
           {"inspect"},
           {"inspect", "a", "--vrify"},
           {"diff", "a"},
           {"diff", "a", "b", "--top", "many"},
           {"plan", "--model", "m", "--world", "2"},
           {"plan", "--config", "/nowhere", "--model", "m", "--world", "2"}}) {
    const CommandRun result = run(arguments);
    EXPECT_EQ(result.code, kUsage) << result.out;
    EXPECT_NE(result.err, "");
    EXPECT_EQ(result.out, "");
  }
}

TEST(ByteSize, IsReadAsPeopleWriteIt) {
  EXPECT_EQ(parse_byte_size("5GB", "--x"), Bytes(5'000'000'000));
  EXPECT_EQ(parse_byte_size("80GiB", "--x"), 80_GiB);
  EXPECT_EQ(parse_byte_size("1.5 tib", "--x"), 1536_GiB);
  EXPECT_EQ(parse_byte_size("4096", "--x"), 4_KiB);
  for (const char* text :
       {"", "GB", "0", "-5GB", "5 G B", "nan", "inf", "1e400", "9e18TB", "0.1B", "0x10"}) {
    EXPECT_THROW(parse_byte_size(text, "--x"), UsageError) << text;
  }
}

TEST(NaturalLess, CountsAsPeopleDo) {
  const NaturalLess less;
  EXPECT_TRUE(less("layers.9.w", "layers.10.w"));
  EXPECT_FALSE(less("layers.10.w", "layers.9.w"));
  EXPECT_TRUE(less("a", "a1"));
  EXPECT_TRUE(less("a1", "b"));
  EXPECT_FALSE(less("x7", "x7"));
  EXPECT_TRUE(less("01", "1") != less("1", "01"));
}

TEST(TextTable, LinesUp) {
  TextTable table({"name", "bytes"});
  table.add({"a", "1"});
  table.add_line();
  table.add({"total", "1,000"});
  EXPECT_EQ(table.text(), "name   bytes\n────────────\na          1\n────────────\ntotal  1,000\n");
  EXPECT_EQ(with_commas(-1234567), "-1,234,567");
  EXPECT_EQ(with_commas(123), "123");
  EXPECT_EQ(count_of(1, "file"), "1 file");
  EXPECT_EQ(count_of(1000, "file"), "1,000 files");
}

// A clock that advances only when the test moves it.
class ProgressTest : public ::testing::Test {
 protected:
  std::ostringstream out_;
  std::ostringstream err_;
  Clock::time_point now_;
  Console console_{out_, err_, true, [this] { return now_; }};
};

TEST_F(ProgressTest, IsShownAfterASecondAndCleared) {
  {
    Progress progress("verifying", 4_GiB, console_);
    progress.add(1_GiB);
    EXPECT_EQ(err_.str(), "");
    now_ += std::chrono::seconds(2);
    progress.add(1_GiB);
    EXPECT_THAT(err_.str(), AllOf(HasSubstr("verifying ████████████░░░░░░░░░░░░  50 %"),
                                  HasSubstr("of 4.00 GiB"), HasSubstr("1.07 GB/s")));
    const std::size_t written = err_.str().size();
    progress.add(1_GiB);  // the line is new enough
    EXPECT_EQ(err_.str().size(), written);
  }
  EXPECT_TRUE(err_.str().ends_with("\r\x1b[K"));
  EXPECT_EQ(out_.str(), "");
}

TEST_F(ProgressTest, NobodyLooksWithoutATerminal) {
  console_.err_is_terminal = false;
  Progress progress("verifying", 2_B, console_);
  now_ += std::chrono::seconds(5);
  progress.add(1_B);
  EXPECT_EQ(err_.str(), "");
}

}  // namespace
}  // namespace strata::cli
