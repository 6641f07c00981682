#include "strata/io/thread_engine.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/io/pending_range.h"

namespace strata::io {
namespace {

// One transfer, shared by its Transfer, the queue and the threads that serve its pieces.
class Job {
 public:
  struct Piece {
    std::int64_t index;
    PendingRange range;
  };

  Job(PendingRange range, Bytes piece)
      : range_(range),
        piece_(piece),
        pieces_((range.wanted().value + piece.value - 1) / piece.value) {}

  // The next piece to serve; none when all are handed out, or when one has failed.
  std::optional<Piece> claim() {
    const std::lock_guard lock(mutex_);
    if (error_ != nullptr || claimed_ == pieces_) return std::nullopt;
    const std::int64_t index = claimed_++;
    const Bytes begin = piece_ * index;
    return Piece{index, range_.piece(begin, std::min(piece_, range_.wanted() - begin))};
  }

  // Pieces are claimed in order, so all those below a failed one have been claimed and will be
  // settled: the error at the lowest offset always wins.
  void settle(std::int64_t index, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    ++settled_;
    if (error != nullptr && (error_ == nullptr || index < error_index_)) {
      error_ = std::move(error);
      error_index_ = index;
    }
    if (finished()) finished_.notify_all();
  }

  bool done() {
    const std::lock_guard lock(mutex_);
    return finished();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return finished(); });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

  void wait_quietly() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return finished(); });
  }

 private:
  bool finished() const {
    return settled_ == claimed_ && (error_ != nullptr || claimed_ == pieces_);
  }

  const PendingRange range_;
  const Bytes piece_;
  const std::int64_t pieces_;
  std::mutex mutex_;
  std::condition_variable finished_;
  std::int64_t claimed_ = 0;
  std::int64_t settled_ = 0;
  std::int64_t error_index_ = 0;
  std::exception_ptr error_;
};

class JobTransfer final : public Transfer {
 public:
  explicit JobTransfer(std::shared_ptr<Job> job) : job_(std::move(job)) {}
  ~JobTransfer() override { job_->wait_quietly(); }
  bool done() override { return job_->done(); }
  void wait() override { job_->wait(); }

 private:
  std::shared_ptr<Job> job_;
};

}  // namespace

class ThreadEngine::Pool {
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
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void enqueue(std::shared_ptr<Job> job) {
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
      const std::shared_ptr<Job> job = queue_.front();
      std::optional<Job::Piece> piece = job->claim();
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
  std::deque<std::shared_ptr<Job>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

ThreadEngine::ThreadEngine(ThreadEngineOptions options, std::shared_ptr<SystemCalls> calls)
    : options_(options) {
  if (options.threads < 1 || options.piece.value < 1 || options.queue_max < 1) {
    throw UsageError(fmt::format(
        "a thread engine needs at least one thread, a piece of one byte and a queue of one: "
        "threads={} piece={} queue_max={}",
        options.threads, options.piece.value, options.queue_max));
  }
  STRATA_ASSERT(calls != nullptr);
  pool_ = std::make_unique<Pool>(options, std::move(calls));
}

ThreadEngine::~ThreadEngine() = default;

std::unique_ptr<Transfer> ThreadEngine::read(const File& file, Bytes offset,
                                             std::span<std::byte> target) {
  auto job = std::make_shared<Job>(PendingRange::reading(file, offset, target), options_.piece);
  if (!target.empty()) pool_->enqueue(job);
  return std::make_unique<JobTransfer>(std::move(job));
}

std::unique_ptr<Transfer> ThreadEngine::write(const File& file, Bytes offset,
                                              std::span<const std::byte> source) {
  auto job = std::make_shared<Job>(PendingRange::writing(file, offset, source), options_.piece);
  if (!source.empty()) pool_->enqueue(job);
  return std::make_unique<JobTransfer>(std::move(job));
}

}  // namespace strata::io
