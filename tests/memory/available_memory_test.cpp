#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "strata/memory/system_memory.h"

namespace strata::memory {
namespace {

namespace fs = std::filesystem;

// A tree of files that stands for the system's /proc and /sys.
class AvailableMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "strata_memory_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
    write("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:   1000 kB\nBuffers: 1 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const fs::path& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  fs::path root_;
};

TEST_F(AvailableMemory, IsTheKernelsCountWithoutGroups) {
  EXPECT_EQ(available_memory(root_), 1000_KiB);
}

TEST_F(AvailableMemory, IsBoundedByAVersion2GroupAndItsDroppableCacheIsFree) {
  write("proc/self/cgroup", "0::/job/rank0\n");
  write("sys/fs/cgroup/job/rank0/memory.max", "500000\n");
  write("sys/fs/cgroup/job/rank0/memory.current", "450000\n");
  write("sys/fs/cgroup/job/rank0/memory.stat", "anon 1\nactive_file 7\ninactive_file 30000\n");
  EXPECT_EQ(available_memory(root_), 80000_B);
}

TEST_F(AvailableMemory, IsBoundedByTheTightestGroupOnTheWayUp) {
  write("proc/self/cgroup", "0::/job/rank0\n");
  write("sys/fs/cgroup/job/memory.max", "100000\n");
  write("sys/fs/cgroup/job/memory.current", "90000\n");
  write("sys/fs/cgroup/job/rank0/memory.max", "max\n");
  write("sys/fs/cgroup/job/rank0/memory.current", "5\n");
  EXPECT_EQ(available_memory(root_), 10000_B);
}

TEST_F(AvailableMemory, SeesTheMountsOwnFilesInAContainer) {
  write("proc/self/cgroup", "0::/not/visible/from/here\n");
  write("sys/fs/cgroup/memory.max", "7000\n");
  write("sys/fs/cgroup/memory.current", "1000\n");
  EXPECT_EQ(available_memory(root_), 6000_B);
}

TEST_F(AvailableMemory, IsBoundedByAVersion1Group) {
  write("proc/self/cgroup", "12:cpu,cpuacct:/x\n5:hugetlb,memory:/job\n0::/\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "40000\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "30000\n");
  write("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 5000\n");
  EXPECT_EQ(available_memory(root_), 15000_B);
}

TEST_F(AvailableMemory, IsZeroWhenAGroupIsOverItsLimit) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "1000\n");
  write("sys/fs/cgroup/memory.current", "2000\n");
  EXPECT_EQ(available_memory(root_), 0_B);
}

TEST_F(AvailableMemory, IsUnboundedWhereTheSystemSaysNothing) {
  fs::remove_all(root_ / "proc");
  EXPECT_EQ(available_memory(root_).value, std::numeric_limits<std::int64_t>::max());
}

TEST_F(AvailableMemory, IgnoresFilesThatAreNotWhatTheyShouldBe) {
  write("proc/self/cgroup", "nonsense\n0:\n0::/\n");
  write("sys/fs/cgroup/memory.max", "many\n");
  EXPECT_EQ(available_memory(root_), 1000_KiB);
}

TEST(AvailableMemoryOfThisMachine, IsSomethingAndNotTooMuch) {
  EXPECT_GT(available_memory(), 0_B);
  EXPECT_LT(available_memory().value, std::int64_t{1} << 50);
}

}  // namespace
}  // namespace strata::memory
