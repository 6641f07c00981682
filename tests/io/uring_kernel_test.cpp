// The engine over the kernel's io_uring, and the engine chosen where the kernel refuses it.
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>

#include "io/direct_transfers.h"
#include "io/io_engine_conformance.h"
#include "strata/io/io_engine.h"
#include "strata/io/uring_engine.h"

namespace strata::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

std::unique_ptr<io::IoEngine> kernel_engine(const io::EngineOptions& options) {
  try {
    return io::make_uring_engine(options);
  } catch (const IoError& error) {
    throw EngineNotHere(error.what());
  }
}

struct KernelUring {
  static constexpr Bytes kPiece = 1000_B;
  static std::unique_ptr<io::IoEngine> make() {
    return kernel_engine({.piece = kPiece, .depth = 4, .queue_max = 3});
  }
};

struct DeepKernelUring {
  static constexpr Bytes kPiece = 8_KiB;
  static std::unique_ptr<io::IoEngine> make() {
    return kernel_engine({.piece = kPiece, .depth = 100});
  }
};

struct DirectKernelUring {
  static constexpr Bytes kPiece = 16_KiB;
  static std::unique_ptr<io::IoEngine> make() {
    return std::make_unique<DirectTransfers>(kernel_engine({.piece = kPiece, .depth = 8}));
  }
};

using Kernels = ::testing::Types<KernelUring, DeepKernelUring, DirectKernelUring>;
INSTANTIATE_TYPED_TEST_SUITE_P(Kernel, IoEngineConformance, Kernels);

class UringKernel : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      io::make_kernel_ring(1);
    } catch (const IoError& error) {
      GTEST_SKIP() << error.what();
    }
  }
  TemporaryFolder folder_;
};

TEST_F(UringKernel, ManyDirectTransfersOfRegisteredMemory) {
  constexpr std::size_t kEach = (80_KiB).size();
  BlockMemory source(kEach * 12, 0);
  BlockMemory target(kEach * 12, 0);
  std::ranges::copy(patterned_bytes(kEach * 12, 3), source.bytes().begin());
  io::File file(folder_ / "data", io::File::Mode::kCreate);
  file.reserve(Bytes(kEach * 12));
  const io::File direct = file.direct();
  const auto engine = kernel_engine({.piece = 16_KiB, .depth = 7});
  const auto first = engine->register_memory(source.bytes());
  const auto second = engine->register_memory(target.bytes());
  std::vector<std::unique_ptr<io::Transfer>> transfers;
  for (std::size_t i = 0; i < 12; ++i) {
    transfers.push_back(
        engine->write(direct, Bytes(i * kEach), source.bytes().subspan(i * kEach, kEach)));
  }
  for (const auto& transfer : transfers) transfer->wait();
  transfers.clear();
  for (std::size_t i = 12; i > 0; --i) {
    transfers.push_back(engine->read(direct, Bytes((i - 1) * kEach),
                                     target.bytes().subspan((i - 1) * kEach, kEach)));
  }
  for (const auto& transfer : transfers) transfer->wait();
  EXPECT_TRUE(std::ranges::equal(source.bytes(), target.bytes()));
}

// Runs `action` on a thread of its own, since a thread does not get dropped rights back.
template <typename Action>
void in_a_thread(Action&& action) {
  std::thread(action).join();
}

// io_uring_setup gives `code` in this thread, as in a container.
bool forbid_io_uring(int code) {
  std::array<sock_filter, 4> program{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(code)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{program.size(), program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(EngineChoice, TakesThreadsWhereAContainerForbidsIoUringAndSaysSo) {
  for (const int code : {EPERM, ENOSYS}) {
    in_a_thread([code] {
      if (!forbid_io_uring(code)) GTEST_SKIP() << "this system has no seccomp filters";
      const io::ChosenEngine chosen = io::make_io_engine();
      EXPECT_EQ(chosen.engine->name(), "threads");
      EXPECT_THAT(chosen.refused, HasSubstr("refuses io_uring"));
      EXPECT_THAT(chosen.refused, HasSubstr("seccomp"));
      EXPECT_THROW(io::make_io_engine({.kind = io::EngineKind::kUring}), IoError);
    });
  }
}

TEST(EngineChoice, TakesWhatWasAskedFor) {
  const io::ChosenEngine threads = io::make_io_engine({.kind = io::EngineKind::kThreads});
  EXPECT_EQ(threads.engine->name(), "threads");
  EXPECT_EQ(threads.refused, "");
  EXPECT_THROW(io::make_io_engine({.depth = 0}), UsageError);
}

TEST_F(UringKernel, IsWhatIsTakenWhereItIs) {
  const io::ChosenEngine chosen = io::make_io_engine();
  EXPECT_EQ(chosen.engine->name(), "io_uring");
  EXPECT_EQ(chosen.refused, "");
}

// Takes from this thread the right to lock more memory than the limit.
bool drop_locking_right() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, 2> rights{};
  if (::syscall(SYS_capget, &header, rights.data()) != 0) return false;
  for (auto* set : {&rights[0].effective, &rights[0].permitted}) *set &= ~(1U << CAP_IPC_LOCK);
  return ::syscall(SYS_capset, &header, rights.data()) == 0;
}

// The limit of locked memory, for as long as this lives.
class LockedMemoryLimit {
 public:
  explicit LockedMemoryLimit(Bytes bytes) {
    ::getrlimit(RLIMIT_MEMLOCK, &before_);
    rlimit limit = before_;
    limit.rlim_cur = std::min<rlim_t>(bytes.size(), before_.rlim_max);
    ::setrlimit(RLIMIT_MEMLOCK, &limit);
  }
  ~LockedMemoryLimit() { ::setrlimit(RLIMIT_MEMLOCK, &before_); }
  LockedMemoryLimit(const LockedMemoryLimit&) = delete;
  LockedMemoryLimit& operator=(const LockedMemoryLimit&) = delete;

 private:
  rlimit before_{};
};

TEST_F(UringKernel, ASmallLimitOfLockedMemoryCostsOnlyTheRegistration) {
  in_a_thread([this] {
    if (!drop_locking_right()) GTEST_SKIP() << "this process may not give up its rights";
    const LockedMemoryLimit limit(64_KiB);
    const io::ChosenEngine chosen = io::make_io_engine({.depth = 4});
    std::vector<std::byte> memory((1_MiB).size());
    if (chosen.engine->name() == "io_uring") {  // older kernels lock the queues, too
      EXPECT_THAT(chosen.engine->register_memory(memory)->refused(),
                  AnyOf(HasSubstr("ulimit -l"), HasSubstr("older than 5.19")));
    }
    io::File file(folder_ / "data", io::File::Mode::kCreate);
    chosen.engine->write(file, 0_B, memory)->wait();
    EXPECT_EQ(file.size(), 1_MiB);
  });
}

}  // namespace
}  // namespace strata::testing
