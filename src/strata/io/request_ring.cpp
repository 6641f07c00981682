#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <thread>

#include "strata/base/error.h"
#include "strata/base/file_descriptor.h"
#include "strata/io/uring_engine.h"

namespace strata::io {
namespace {

constexpr std::uint64_t kWakeId = ~std::uint64_t{0};
constexpr int kRegions = 1024;
// The kernel may have no memory for requests at a moment. So long, and then it is an error.
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr int kPausesMax = 10'000;

const char* likely_reason(int code) {
  switch (code) {
    case EPERM:
    case EACCES:
      return "a container's seccomp profile or the sysctl kernel.io_uring_disabled forbids it";
    case ENOSYS:
      return "the kernel is older than 5.1, or a container's seccomp profile hides it";
    case EINVAL:
      return "the kernel is older than 5.10";
    case ENOMEM:
      return "the limit of locked memory (ulimit -l) is too small for its queues";
    default:
      return "the system does not say why";
  }
}

[[noreturn]] void refuse(int code) {
  throw IoError("the kernel refuses io_uring: {}: {}", likely_reason(code), errno_text(code));
}

class KernelRing final : public RequestRing {
 public:
  explicit KernelRing(int depth) : wakes_(::eventfd(0, EFD_CLOEXEC)) {
    if (!wakes_.valid()) refuse(errno);
    const int code = open(static_cast<unsigned>(depth) + 1);  // one that waits for wake()
    if (code != 0) refuse(code);
    has_regions_ = ::io_uring_register_buffers_sparse(&ring_, kRegions) == 0;
  }
  ~KernelRing() override { ::io_uring_queue_exit(&ring_); }

  void begin() override {
    int code = ::io_uring_enable_rings(&ring_);
    if (code < 0) refuse(-code);
    read_wakes();
    code = ::io_uring_submit(&ring_);
    if (code < 0) refuse(-code);
  }

  void push(const Request& request) override {
    io_uring_sqe& entry = next();
    const auto bytes = static_cast<unsigned>(request.bytes);
    const auto offset = static_cast<std::uint64_t>(request.offset.value);
    if (request.target != nullptr && request.region >= 0) {
      ::io_uring_prep_read_fixed(&entry, request.fd, request.target, bytes, offset, request.region);
    } else if (request.target != nullptr) {
      ::io_uring_prep_read(&entry, request.fd, request.target, bytes, offset);
    } else if (request.region >= 0) {
      ::io_uring_prep_write_fixed(&entry, request.fd, request.source, bytes, offset,
                                  request.region);
    } else {
      ::io_uring_prep_write(&entry, request.fd, request.source, bytes, offset);
    }
    ::io_uring_sqe_set_data64(&entry, request.id);
    if (request.may_block) ::io_uring_sqe_set_flags(&entry, IOSQE_ASYNC);
    ++pushed_;
  }

  void wait(std::vector<Result>& results) override {
    for (int pauses = 0; pauses < kPausesMax;) {
      const int code = ::io_uring_submit_and_wait(&ring_, 1);
      if (reap(results)) return;
      if (code >= 0 || code == -EINTR) continue;
      if (code != -EAGAIN && code != -EBUSY) fail(-code);
      ::io_uring_get_events(&ring_);
      if (reap(results)) return;
      std::this_thread::sleep_for(kPause);
      ++pauses;
    }
    fail(EAGAIN);
  }

  void withdraw() noexcept override {
    io_uring_sync_cancel_reg all{};
    all.flags = IORING_ASYNC_CANCEL_ALL | IORING_ASYNC_CANCEL_ANY;
    all.timeout.tv_sec = all.timeout.tv_nsec = -1;
    // Kernels older than 6.0 cannot; transfers end by themselves then.
    if (under_way() > 0) ::io_uring_register_sync_cancel(&ring_, &all);
    wake();  // so that one request ends, and the first call does not block where others have ended
    std::vector<Result> dropped;
    for (;;) {
      reap(dropped);
      if (under_way() == 0) return;
      io_uring_cqe* entry = nullptr;
      const int code = ::io_uring_wait_cqe(&ring_, &entry);  // hands nothing over
      const bool served = code == 0 || code == -EINTR || code == -EAGAIN || code == -EBUSY;
      // Without an answer the kernel may still write the requests' memory at any time, so no other
      // code may get that memory.
      STRATA_ASSERT(served);
      if (code != 0) std::this_thread::sleep_for(kPause);
    }
  }

  void wake() override {
    const std::uint64_t one = 1;
    while (::write(wakes_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  int register_region(int region, std::span<std::byte> memory) override {
    return set_region(region, memory);
  }
  void unregister_region(int region) override { set_region(region, {}); }
  int regions_max() const override { return has_regions_ ? kRegions : 0; }

 private:
  io_uring_sqe& next() {
    io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
    STRATA_ASSERT(entry != nullptr);
    return *entry;
  }

  // Requests on a file that the kernel has, and has not told the end of.
  unsigned under_way() const {
    unsigned waiting = 0;  // in the queue, of which the kernel knows nothing
    for (unsigned at = *ring_.sq.khead; at != ring_.sq.sqe_tail; ++at) {
      if (ring_.sq.sqes[at & *ring_.sq.kring_mask].user_data != kWakeId) ++waiting;
    }
    return pushed_ - waiting;
  }

  // Returns 0 or an errno.
  int set_region(int region, std::span<std::byte> memory) {
    const iovec place{memory.data(), memory.size()};
    const int code = ::io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(region),
                                                            &place, nullptr, 1);
    return code < 0 ? -code : 0;
  }

  // Returns 0 or an errno. Older kernels know fewer flags.
  int open(unsigned entries) {
    constexpr unsigned kDisabled = IORING_SETUP_R_DISABLED;  // until the thread that uses it begins
    constexpr unsigned kSubmitAll = kDisabled | IORING_SETUP_SUBMIT_ALL;
    constexpr std::array kFlags{
        kSubmitAll | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, kSubmitAll,
        kDisabled};
    int code = 0;
    for (const unsigned flags : kFlags) {
      code = -::io_uring_queue_init(entries, &ring_, flags);
      if (code != EINVAL) break;
    }
    return code;
  }

  void read_wakes() {
    io_uring_sqe& entry = next();
    ::io_uring_prep_read(&entry, wakes_.get(), &woken_, sizeof woken_, 0);
    ::io_uring_sqe_set_data64(&entry, kWakeId);
  }

  // Whether anything has ended.
  bool reap(std::vector<Result>& results) {
    unsigned head = 0;
    unsigned count = 0;
    bool woken = false;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      ++count;
      if (entry->user_data == kWakeId) {
        woken = true;
      } else {
        --pushed_;
        results.push_back({static_cast<std::uint32_t>(entry->user_data), entry->res});
      }
    }
    ::io_uring_cq_advance(&ring_, count);
    if (woken) read_wakes();
    return count > 0;
  }

  [[noreturn]] static void fail(int code) {
    throw IoError("the kernel no longer serves io_uring's queue: {}", errno_text(code));
  }

  FileDescriptor wakes_;
  std::uint64_t woken_ = 0;  // the kernel writes it
  io_uring ring_{};
  unsigned pushed_ = 0;  // requests on files that have not ended
  bool has_regions_ = false;
};

}  // namespace

std::unique_ptr<RequestRing> make_kernel_ring(int depth) {
  return std::make_unique<KernelRing>(depth);
}

}  // namespace strata::io
