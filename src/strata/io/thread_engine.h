// IoEngine on a small pool of threads that call pread and pwrite. A transfer is cut into pieces, so
// that several threads serve one big transfer; transfers are begun in the order they came. Of
// several failed pieces the one at the lowest offset is reported, and `got` is what lies before it.
// Threads, ownership, errors: as IoEngine says. At most `queue_max` transfers wait for a thread;
// the next read() or write() blocks until one is begun.
#pragma once

#include <memory>

#include "strata/io/io_engine.h"
#include "strata/io/system_calls.h"

namespace strata::io {

struct ThreadEngineOptions {
  int threads = 4;
  Bytes piece = 4_MiB;
  int queue_max = 64;
};

class ThreadEngine final : public IoEngine {
 public:
  // UsageError if an option is not positive.
  explicit ThreadEngine(ThreadEngineOptions options = {},
                        std::shared_ptr<SystemCalls> calls = std::make_shared<KernelCalls>());
  ~ThreadEngine() override;
  ThreadEngine(const ThreadEngine&) = delete;
  ThreadEngine& operator=(const ThreadEngine&) = delete;

  std::string_view name() const override { return "threads"; }
  std::unique_ptr<Transfer> read(const File& file, Bytes offset,
                                 std::span<std::byte> target) override;
  std::unique_ptr<Transfer> write(const File& file, Bytes offset,
                                  std::span<const std::byte> source) override;

 private:
  class Pool;
  ThreadEngineOptions options_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace strata::io
