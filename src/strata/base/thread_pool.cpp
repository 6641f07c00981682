#include "strata/base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/rank_cores.h"

namespace strata {
namespace {

using Body = std::function<void(std::int64_t, std::int64_t)>;

// A kernel call is often followed by the next one within microseconds, and waking a sleeping thread
// costs tens of them; but ranks share cores, so the spin must stay far below a time slice.
constexpr int kSpins = 2000;

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One call of parallel_for: chunks are handed out in ascending order.
struct Loop {
  std::int64_t count;
  std::int64_t grain;
  std::int64_t chunks;
  const Body* body;
  std::atomic<std::int64_t> next{0};
  std::mutex mutex{};  // guards the two below
  std::int64_t failed_chunk = std::numeric_limits<std::int64_t>::max();
  std::exception_ptr failure{};

  void run() {
    for (;;) {
      const std::int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks) return;
      try {
        (*body)(chunk * grain, std::min(count, (chunk + 1) * grain));
      } catch (...) {
        fail(chunk, std::current_exception());
      }
    }
  }

  // No further chunk is begun. Those before this one have been, so the first failure by chunk order
  // is always among those that are seen.
  void fail(std::int64_t chunk, std::exception_ptr error) {
    next.store(chunks, std::memory_order_relaxed);
    const std::lock_guard lock(mutex);
    if (chunk < failed_chunk) {
      failed_chunk = chunk;
      failure = std::move(error);
    }
  }
};

}  // namespace

struct ThreadPool::State {
  std::vector<std::thread> workers;
  std::vector<int> cores;  // written before there are workers
  std::mutex mutex;        // guards `loop`, `stop` and the writes of the two atomics
  std::condition_variable wake;
  std::condition_variable idle;
  Loop* loop = nullptr;  // on the caller's stack; null as soon as no more workers may enter it
  bool stop = false;
  std::atomic<std::uint64_t> epoch{0};  // counts loops; read without the lock to spin on
  std::atomic<int> running{0};          // workers inside `loop`; likewise
  std::atomic<bool> busy{false};

  void work() {
    bind_this_thread(cores);
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex, std::defer_lock);
    for (;;) {
      for (int i = 0; i < kSpins && epoch.load(std::memory_order_relaxed) == seen; ++i) {
        pause_briefly();
      }
      lock.lock();
      wake.wait(lock, [&] { return stop || epoch.load(std::memory_order_relaxed) != seen; });
      if (stop) return;
      seen = epoch.load(std::memory_order_relaxed);
      if (loop != nullptr) {
        Loop& entered = *loop;
        running.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        entered.run();
        lock.lock();
        if (running.fetch_sub(1, std::memory_order_relaxed) == 1) idle.notify_one();
      }
      lock.unlock();
    }
  }

  void share(Loop& shared) {
    {
      const std::lock_guard lock(mutex);
      loop = &shared;
      epoch.fetch_add(1, std::memory_order_relaxed);
    }
    wake.notify_all();
    shared.run();
    for (int i = 0; i < kSpins && running.load(std::memory_order_relaxed) != 0; ++i) {
      pause_briefly();
    }
    std::unique_lock lock(mutex);
    loop = nullptr;  // a worker that wakes only now finds nothing and is not waited for
    idle.wait(lock, [&] { return running.load(std::memory_order_relaxed) == 0; });
  }

  void join() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
      epoch.fetch_add(1, std::memory_order_relaxed);
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
  }
};

ThreadPool::ThreadPool(int threads, std::vector<int> cores) : state_(std::make_unique<State>()) {
  if (threads < 1) {
    throw UsageError(fmt::format(
        "A thread pool needs at least one thread, the caller's own; asked for: {}", threads));
  }
  state_->cores = std::move(cores);
  state_->workers.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i) {
      state_->workers.emplace_back([state = state_.get()] { state->work(); });
    }
  } catch (...) {
    state_->join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  state_->join();
}

int ThreadPool::threads() const {
  return static_cast<int>(state_->workers.size()) + 1;
}

void ThreadPool::parallel_for(std::int64_t count, std::int64_t grain, const Body& body) {
  STRATA_ASSERT(count >= 0 && grain > 0);
  if (count == 0) return;
  const bool was_busy = state_->busy.exchange(true, std::memory_order_acquire);
  STRATA_ASSERT(!was_busy);  // called from inside a body, or by two threads
  const std::int64_t chunks = (count - 1) / grain + 1;
  Loop loop{.count = count, .grain = grain, .chunks = chunks, .body = &body};
  if (chunks == 1 || state_->workers.empty()) {
    loop.run();
  } else {
    state_->share(loop);
  }
  state_->busy.store(false, std::memory_order_release);
  if (loop.failure) std::rethrow_exception(loop.failure);
}

}  // namespace strata
