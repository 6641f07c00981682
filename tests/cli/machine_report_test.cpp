// `strata doctor`'s part without Python: facts of this machine, and problems of machines that a
// folder stands for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <cstdlib>

#include "cli/command_run.h"
#include "cli/saved_checkpoint.h"
#include "strata/cli/commands.h"
#include "strata/device/cpu_device.h"
#include "strata/device/cuda_device.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<std::string> problems_of(const Report& report) {
  return report.json["problems"].get<std::vector<std::string>>();
}

// A machine without anything, but for shared memory where the test's own folder lies.
struct Machine {
  Machine() { std::filesystem::create_directories(folder / "dev/shm"); }
  Report look(MachineRequest request = {}) const {
    request.root = folder.path();
    return look_at_machine(request);
  }
  TestFolder folder;
};

TEST(MachineReport, TellsEachFactOfThisMachineInALine) {
  const Report report = look_at_machine({});
  for (const char* name : {"program", "system", "memory", "cores", "ulimit -l", "/dev/shm",
                           "io_uring", "ranks", "CUDA"}) {
    ASSERT_TRUE(report.json["facts"].contains(name)) << name;
    EXPECT_THAT("\n" + report.text, HasSubstr(std::string("\n") + name)) << name;
    EXPECT_FALSE(report.json["facts"][name]["text"].get<std::string>().empty()) << name;
  }
  EXPECT_GT(report.json["facts"]["memory"]["available"], 0);
  EXPECT_GT(report.json["facts"]["cores"]["count"], 0);
  EXPECT_EQ(report.json["right"], report.right);
  EXPECT_EQ(report.right, problems_of(report).empty());
}

TEST(MachineReport, ShowsTheLimitsOfTheControlGroup) {
  const Machine machine;
  std::filesystem::create_directories(machine.folder / "sys/fs/cgroup");
  write_text(machine.folder / "sys/fs/cgroup/cpu.max", "150000 100000\n");
  write_text(machine.folder / "sys/fs/cgroup/memory.max", "1073741824\n");
  const nlohmann::json facts = machine.look().json["facts"];
  EXPECT_EQ(facts["cpu.max"]["text"], "150000 100000");
  EXPECT_EQ(facts["memory.max"]["text"], "1073741824");
  EXPECT_FALSE(facts.contains("huge pages"));
}

TEST(MachineReport, NamesMissingSharedMemoryAndTheRemedy) {
  const Machine machine;
  EXPECT_THAT(problems_of(machine.look()), Not(Contains(HasSubstr("missing"))));
  std::filesystem::remove(machine.folder / "dev/shm");
  const Report report = machine.look();
  EXPECT_FALSE(report.right);
  EXPECT_THAT(problems_of(report), Contains(AllOf(HasSubstr("/dev/shm"), HasSubstr("missing"),
                                                  HasSubstr("--ipc=host"))));
  EXPECT_THAT(report.text, HasSubstr("\nPROBLEM       NCCL and data loaders"));
}

TEST(MachineReport, SaysThatAGpuCannotBeUsed) {
  if (device::cuda_device_count() > 0) GTEST_SKIP() << "this machine's GPU can be used";
  const Machine machine;
  write_text(machine.folder / "dev/nvidia0", "");
  EXPECT_THAT(problems_of(machine.look()),
              Contains(AllOf(HasSubstr("/dev/nvidia0"), HasSubstr("CUDA_VISIBLE_DEVICES"))));
}

TEST(MachineReport, LooksAtDrivesThatAreNamedAndThoseOfAConfiguration) {
  const Machine machine;
  const std::string drive = machine.folder / "drive";
  const std::string missing = machine.folder / "missing";
  std::filesystem::create_directories(drive);
  write_text(machine.folder / "ds.json", R"({"zero_optimization": {"stage": 3, "offload_param":
      {"device": "nvme", "nvme_path": ")" + missing +
                                             R"("}}})");
  const Report report = machine.look({{drive, drive}, machine.folder / "ds.json"});
  const nlohmann::json fact = report.json["facts"]["drive " + drive];
  EXPECT_GT(fact["free"], 0);
  EXPECT_FALSE(fact["file_system"].get<std::string>().empty());
  EXPECT_TRUE(std::filesystem::is_empty(drive));
  EXPECT_THAT(problems_of(report), Contains(AllOf(HasSubstr(missing), HasSubstr("exists"))));
  EXPECT_EQ(report.text.find("drive " + drive), report.text.rfind("drive " + drive));
}

// Everything of another device, and a kernel of its own that doubles nothing.
class LazyDevice final : public device::CpuDevice {
 public:
  using CpuDevice::CpuDevice;
  void sum_in_order(std::span<float>, std::span<const std::byte* const>, DType, float, bool,
                    device::Stream&) override {}
};

TEST(MachineReport, RunsAKernelAndLooksAtItsValues) {
  device::CpuDevice device;
  EXPECT_THAT(try_kernel(device), IsEmpty());
  LazyDevice lazy;
  EXPECT_THAT(try_kernel(lazy), HasSubstr("wrong values"));
}

TEST(Doctor, SaysWhichPythonLacksThePackage) {
  ::setenv("STRATA_PYTHON", "/nowhere/python", 1);
  const CommandRun found = run({"doctor", "--json"});
  EXPECT_EQ(found.code, kFoundWrong);
  EXPECT_THAT(found.json()["problems"].get<std::vector<std::string>>(),
              Contains(HasSubstr("/nowhere/python -m pip install strata-train")));
  const CommandRun shown = run({"doctor"});
  EXPECT_THAT(shown.out, AllOf(HasSubstr("\n/dev/shm"), HasSubstr("\nPROBLEM       this Python")));
  ::unsetenv("STRATA_PYTHON");
}

TEST(Doctor, RefusesAWrongCommandLine) {
  EXPECT_EQ(run({"doctor", "--ranks", "0"}).code, kUsage);
  EXPECT_EQ(run({"doctor", "--config", "/nowhere/ds.json"}).code, kUsage);
}

}  // namespace
}  // namespace strata::cli
