// IoEngine on a small pool of threads that call pread and pwrite. The engine cuts a transfer into
// pieces, so that several threads serve one big transfer. It begins transfers in the order in which
// they came. When several pieces fail, it reports the failure at the lowest offset, and `got` is
// the number of bytes before that. Threads, ownership, errors: as for IoEngine. At most `queue_max`
// transfers wait for a thread; the next read() or write() blocks until one is begun.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "strata/io/io_engine.h"
#include "strata/io/pending_range.h"

namespace strata::io {

class ThreadEngine final : public JobEngine {
 public:
  // UsageError if an option is not positive.
  explicit ThreadEngine(const EngineOptions& options = {.piece = 4_MiB},
                        std::shared_ptr<SystemCalls> calls = std::make_shared<SystemCalls>());
  ~ThreadEngine() override { stop(); }

  std::string_view name() const override { return "threads"; }

 private:
  void enqueue(const std::shared_ptr<TransferJob>& job) override;
  void serve();
  void stop();

  const std::size_t queue_max_;
  const std::shared_ptr<SystemCalls> calls_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable room_;
  std::deque<std::shared_ptr<TransferJob>> queue_;  // guarded by mutex_, like the next
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace strata::io
