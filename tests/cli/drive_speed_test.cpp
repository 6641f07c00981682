// `strata bench-io`: the bytes that it moves, its words about folders, and the figures that it
// recommends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

#include "cli/command_run.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/cli/commands.h"
#include "strata/engine/config/config.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class BenchIo : public ::testing::Test {
 protected:
  CommandRun bench(std::vector<std::string> more, const std::string& path = {}) {
    std::vector<std::string> arguments{"bench-io", path.empty() ? folder_.path() : path};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  }
  testing::TemporaryFolder folder_;
};

TEST_F(BenchIo, MeasuresEveryBlockAtEveryDepthAndLeavesNothingBehind) {
  for (const char* engine : {"auto", "threads"}) {
    const CommandRun result = bench({"--size", "1MiB", "--block", "16KiB,64KiB", "--depth", "1,4",
                                     "--engine", engine, "--json"});
    ASSERT_EQ(result.code, kDone) << result.err;
    const auto json = result.json();
    EXPECT_EQ(json["size"], (1_MiB).value);
    ASSERT_EQ(json["drives"].size(), 1U);
    const auto& drive = json["drives"][0];
    EXPECT_EQ(drive["path"], folder_.path());
    ASSERT_EQ(drive["figures"].size(), 4U);
    EXPECT_EQ(drive["figures"][1]["block_size"], (16_KiB).value);
    EXPECT_EQ(drive["figures"][1]["queue_depth"], 4);
    for (const auto& cell : drive["figures"]) {
      for (const char* figure : {"read_gb_per_s", "write_gb_per_s", "both_gb_per_s"})
        EXPECT_GT(cell[figure].get<double>(), 0) << figure;
    }
    EXPECT_GE(json["aio"]["block_size"], (16_KiB).value);
    EXPECT_GE(json["aio"]["queue_depth"], 1);
    EXPECT_NO_THROW(engine::Config::parse(nlohmann::json{{"aio", json["aio"]}}.dump()));
    EXPECT_TRUE(folder_.names().empty());
  }
}

TEST_F(BenchIo, ShowsATableAndTheSectionOfTheConfiguration) {
  const CommandRun result =  // sizes that are given go before those of --quick
      bench({"--size", "256KiB", "--block", "64KiB", "--depth", "2", "--quick"});
  EXPECT_EQ(result.code, kDone) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr(folder_.path() + ": "), HasSubstr("a file of 256 KiB"),
                                HasSubstr("block     depth  read GB/s  write GB/s  both GB/s"),
                                HasSubstr("in the configuration: \"aio\": "
                                          "{\"block_size\":65536,\"queue_depth\":2}")));
}

TEST_F(BenchIo, SaysThatMemoryIsNoDrive) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "this system has no /dev/shm";
  const CommandRun result =
      bench({"--size", "256KiB", "--block", "64KiB", "--depth", "2"}, "/dev/shm");
  EXPECT_EQ(result.code, kDone) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("through the page cache"),
                                HasSubstr("tmpfs is memory: O_DIRECT is not offered")));
}

TEST_F(BenchIo, RefusesFoldersWhereNothingCanBeMeasured) {
  CommandRun result = bench({}, folder_ / "nowhere");
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, AllOf(HasSubstr("found none"), HasSubstr("nowhere")));
  result = bench({}, "/proc");
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, HasSubstr("/proc"));
  result = bench({"--size", "8000000TB", "--block", "64KiB"});
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, AllOf(HasSubstr("does not fit"), HasSubstr("free=")));
  EXPECT_TRUE(folder_.names().empty());
}

TEST_F(BenchIo, RefusesSizesThatDoNotGoTogether) {
  EXPECT_THAT(bench({"--block", "1000"}).err, HasSubstr("--block: wanted a multiple of 4.00 KiB"));
  EXPECT_THAT(bench({"--size", "1MiB", "--block", "1MiB"}).err, HasSubstr("--size"));
  for (const std::vector<std::string>& more :
       std::vector<std::vector<std::string>>{{"--block", "1MiB,x"},
                                             {"--size", "much"},
                                             {"--depth", "0"},
                                             {"--depth", "5000"},
                                             {"--engine", "libaio"}}) {
    const CommandRun result = bench(more);
    EXPECT_EQ(result.code, kUsage);
    EXPECT_NE(result.err, "");
  }
  EXPECT_EQ(run({"bench-io"}).code, kUsage);
}

TEST(BestOf, TakesTheFastestAndOfThoseAsGoodTheOneThatHoldsLeast) {
  EXPECT_EQ(best_of({{{1_MiB, 8, 2, 1, 0}, {1_MiB, 32, 3, 2, 0}}}), 1U);
  EXPECT_EQ(best_of({{{1_MiB, 32, 3, 2, 0}, {1_MiB, 8, 2.99, 1.99, 0}}}), 1U);
  EXPECT_EQ(best_of({{{4_MiB, 32, 3, 2, 0}, {1_MiB, 32, 3, 0.5, 0}}}), 0U)
      << "reading alone is not enough";
}

TEST(BestOf, LooksAtTheDriveThatLosesMost) {
  const std::vector<DriveFigures> one{{1_MiB, 8, 4, 4, 0}, {1_MiB, 32, 4.4, 4.4, 0}};
  const std::vector<DriveFigures> other{{1_MiB, 8, 2, 2, 0}, {1_MiB, 32, 1, 1, 0}};
  EXPECT_EQ(best_of({one, other}), 0U);
  EXPECT_EQ(best_of({one}), 1U);
}

TEST(DriveFolder, HasAFileWithoutAName) {
  const testing::TemporaryFolder folder;
  std::ostringstream text;
  bool measured = false;
  Console console{text, text, false, [&] {
                    measured = true;
                    EXPECT_TRUE(folder.names().empty());
                    return Clock::now();
                  }};
  const Report report = measure_drives(
      {.paths = {folder.path()}, .size = 1_MiB, .blocks = {64_KiB}, .depths = {2}}, console);
  EXPECT_TRUE(measured);
  EXPECT_NE(report.json["drives"][0]["file_system"], "");
}

}  // namespace
}  // namespace strata::cli
