#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "strata/memory/system_memory.h"

namespace strata::memory {
namespace {

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
