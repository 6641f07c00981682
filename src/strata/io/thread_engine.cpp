#include "strata/io/thread_engine.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/io/pending_range.h"

namespace strata::io {

class ThreadEngine::Pool : NonCopyable {
 public:
  Pool(const ThreadEngineOptions& options, std::shared_ptr<SystemCalls> calls)
      : queue_max_(static_cast<std::size_t>(options.queue_max)), calls_(std::move(calls)) {
    try {
      for (int i = 0; i < options.threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }

  void enqueue(std::shared_ptr<TransferJob> job) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [this] { return queue_.size() < queue_max_; });
    queue_.push_back(std::move(job));
    work_.notify_all();
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::shared_ptr<TransferJob> job = queue_.front();
      std::optional<TransferJob::Piece> piece = job->claim();
      if (!piece) {
        queue_.pop_front();
        room_.notify_one();
        continue;
      }
      lock.unlock();
      std::exception_ptr error;
      try {
        piece->range.run(*calls_);
      } catch (...) {
        error = std::current_exception();
      }
      job->settle(piece->index, std::move(error));
      lock.lock();
    }
  }

  const std::size_t queue_max_;
  const std::shared_ptr<SystemCalls> calls_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable room_;
  std::deque<std::shared_ptr<TransferJob>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

ThreadEngine::ThreadEngine(const ThreadEngineOptions& options, std::shared_ptr<SystemCalls> calls)
    : JobEngine(options.piece) {
  if (options.threads < 1 || options.piece.value < 1 || options.queue_max < 1) {
    throw UsageError(
        "a thread engine needs at least one thread, a piece of one byte and a queue of one: "
        "threads={} piece={} queue_max={}",
        options.threads, options.piece.value, options.queue_max);
  }
  STRATA_ASSERT(calls != nullptr);
  pool_ = std::make_unique<Pool>(options, std::move(calls));
}

ThreadEngine::~ThreadEngine() = default;

void ThreadEngine::enqueue(const std::shared_ptr<TransferJob>& job) {
  pool_->enqueue(job);
}

}  // namespace strata::io
