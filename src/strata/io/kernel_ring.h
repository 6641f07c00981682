// RequestRing on the kernel's io_uring, through liburing. One thread alone queues requests, submits
// them and reaps their results, so the kernel needs no lock and interrupts no other thread
// (SINGLE_ISSUER, DEFER_TASKRUN, where it has them). A request that may block goes to a thread of
// the kernel's at once. wake() writes to an eventfd that a request always reads, so waiting is one
// system call. Files are not registered: that would only save counting their users, which takes
// nanoseconds of a request that moves a MiB. Threads, ownership: as for RequestRing. Errors: also
// IoError from the constructor where the kernel refuses io_uring, with the likely reason.
#pragma once

#include <memory>

#include "strata/io/request_ring.h"

namespace strata::io {

class KernelRing final : public RequestRing {
 public:
  // At most `depth` requests are under way at once.
  explicit KernelRing(int depth);
  ~KernelRing() override;
  KernelRing(const KernelRing&) = delete;
  KernelRing& operator=(const KernelRing&) = delete;

  void begin() override;
  void push(const Request& request) override;
  void wait(std::vector<Result>& results) override;
  void withdraw() noexcept override;
  void wake() override;
  int register_region(int region, std::span<std::byte> memory) override;
  void unregister_region(int region) override;
  int regions_max() const override;

 private:
  class Queue;
  std::unique_ptr<Queue> queue_;
};

}  // namespace strata::io
