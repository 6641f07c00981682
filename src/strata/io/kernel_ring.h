// RequestRing on the kernel's io_uring, by liburing. The one thread that uses it also hands over
// and reaps, so the kernel needs no lock and interrupts nobody else (SINGLE_ISSUER, DEFER_TASKRUN,
// where it has them). A request that may block goes to a thread of the kernel's at once. wake()
// writes to an eventfd that a request always reads, so waiting is one system call. Files are not
// registered: that would save counting their users, nanoseconds of a request that moves a MiB.
// Threads, ownership: as RequestRing says. Errors: also IoError from the constructor where the
// kernel refuses io_uring, with the likely reason.
#pragma once

#include <memory>

#include "strata/io/request_ring.h"

namespace strata::io {

class KernelRing final : public RequestRing {
 public:
  // For so many requests under way.
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
