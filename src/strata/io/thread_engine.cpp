#include "strata/io/thread_engine.h"

#include <exception>
#include <optional>
#include <utility>

#include "strata/base/error.h"

namespace strata::io {

ThreadEngine::ThreadEngine(const EngineOptions& options, std::shared_ptr<SystemCalls> calls)
    : JobEngine(options.piece),
      queue_max_(static_cast<std::size_t>(options.queue_max)),
      calls_(std::move(calls)) {
  if (options.threads < 1 || options.piece.value < 1 || options.queue_max < 1)
    throw UsageError(
        "a thread engine needs at least one thread, a piece of one byte and a queue of one: "
        "threads={} piece={} queue_max={}",
        options.threads, options.piece.value, options.queue_max);
  STRATA_ASSERT(calls_ != nullptr);
  try {
    for (int i = 0; i < options.threads; ++i) threads_.emplace_back([this] { serve(); });
  } catch (...) {
    stop();
    throw;
  }
}

void ThreadEngine::enqueue(const std::shared_ptr<TransferJob>& job) {
  std::unique_lock lock(mutex_);
  room_.wait(lock, [this] { return queue_.size() < queue_max_; });
  queue_.push_back(job);
  work_.notify_all();
}

void ThreadEngine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadEngine::serve() {
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

}  // namespace strata::io
