#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "strata/memory/host_buffer.h"

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

constexpr std::size_t kBytes = std::size_t{4} << 20U;

// New pages of this process, written to.
class Pages {
 public:
  Pages()
      : memory_(
            ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    write(kBytes);
  }
  ~Pages() { ::munmap(memory_, kBytes); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  void write(std::size_t bytes) { std::memset(memory_, 1, bytes); }
  std::span<const std::byte> bytes() const { return {static_cast<std::byte*>(memory_), kBytes}; }

 private:
  void* memory_;
};

// A child process that shares this one's memory until it ends.
class Fork {
 public:
  Fork() {
    EXPECT_EQ(::pipe(end_.data()), 0);
    child_ = ::fork();
    if (child_ == 0) {
      ::close(end_[1]);
      char byte = 0;
      [[maybe_unused]] const auto closed = ::read(end_[0], &byte, 1);
      ::_exit(0);
    }
  }
  ~Fork() {
    ::close(end_[0]);
    ::close(end_[1]);
    ::waitpid(child_, nullptr, 0);
  }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;

 private:
  std::array<int, 2> end_{};
  pid_t child_ = -1;
};

TEST(PageSharing, PagesAreSharedFromAForkUntilSomebodyWrites) {
  Pages own;
  Pages other;
  const std::array parts{own.bytes(), std::span<const std::byte>(), other.bytes().subspan(1, 100)};
  EXPECT_FALSE(shares_pages(parts));
  {
    const Fork child;
    EXPECT_TRUE(shares_pages(parts));
    own.write(kBytes);
    other.write(kBytes);
    EXPECT_FALSE(shares_pages(parts));
  }
  EXPECT_FALSE(shares_pages(parts));
}

TEST(PageSharing, AFewPagesDoNotCount) {
  Pages own;
  const std::array parts{own.bytes()};
  const Fork child;
  own.write(kBytes / 64 * 61);
  EXPECT_FALSE(shares_pages(parts));
  EXPECT_TRUE(shares_pages(std::array{own.bytes().last(kBytes / 8)}));
}

TEST(PageSharing, NothingIsSharedWhereTheSystemDoesNotSay) {
  const Pages own;
  const std::array parts{own.bytes()};
  const Fork child;
  EXPECT_FALSE(shares_pages(parts, "/nowhere/pagemap"));
  EXPECT_FALSE(shares_pages(parts, "/dev/null"));
  EXPECT_FALSE(shares_pages({}));
}

}  // namespace
}  // namespace strata::memory
