#include "strata/base/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "strata/base/error.h"

namespace strata {
namespace {

constexpr int kMostCores = 1 << 20;

struct FreeCores {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CoreSet = std::unique_ptr<cpu_set_t, FreeCores>;

// "node0" is 0; -1: no node.
int node_in(const std::string& name) {
  constexpr std::size_t kPrefix = 4;
  int node = -1;
  if (name.size() <= kPrefix || name.compare(0, kPrefix, "node") != 0) return -1;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix, end, node);
  return error == std::errc() && stop == end ? node : -1;
}

int node_of(const std::filesystem::path& core) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(core, error), end; !error && entry != end;
       entry.increment(error)) {
    const int node = node_in(entry->path().filename().string());
    if (node >= 0) return node;
  }
  return 0;
}

}  // namespace

std::vector<int> allowed_cores() {
  // Machines with more cores than a cpu_set_t has bits refuse it.
  for (int most = CPU_SETSIZE; most <= kMostCores; most *= 4) {
    const CoreSet set(CPU_ALLOC(static_cast<std::size_t>(most)));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(most));
    if (::sched_getaffinity(0, bytes, set.get()) != 0) continue;
    std::vector<int> cores;
    for (int core = 0; core < most; ++core) {
      if (CPU_ISSET_S(static_cast<std::size_t>(core), bytes, set.get())) cores.push_back(core);
    }
    return cores;
  }
  return {};
}

std::vector<HostCore> places_of(std::span<const int> cores, const std::filesystem::path& system) {
  std::vector<HostCore> places;
  for (const int id : cores) {
    const std::filesystem::path folder = system / ("cpu" + std::to_string(id));
    HostCore core{.id = id, .node = node_of(folder), .physical = id};
    // "0-1" or "0,64": the least comes first.
    if (std::ifstream siblings(folder / "topology/thread_siblings_list"); siblings.good()) {
      int first = 0;
      if (siblings >> first) core.physical = first;
    }
    places.push_back(core);
  }
  return places;
}

std::vector<int> part_of_rank(std::vector<HostCore> cores, int rank, int ranks) {
  if (ranks < 1 || rank < 0 || rank >= ranks || std::ssize(cores) < ranks) return {};
  const auto place = [](const HostCore& c) { return std::tuple(c.node, c.physical, c.id); };
  std::ranges::sort(cores, {}, place);
  std::map<std::pair<int, int>, std::vector<int>> by_core;
  for (const HostCore& core : cores) by_core[{core.node, core.physical}].push_back(core.id);
  std::vector<std::vector<int>> pieces;
  for (const auto& [_, ids] : by_core) pieces.push_back(ids);
  if (std::ssize(pieces) < ranks) {  // then hardware threads are what can be divided
    pieces.clear();
    for (const HostCore& core : cores) pieces.push_back({core.id});
  }
  const std::ptrdiff_t count = std::ssize(pieces);
  std::vector<int> part;
  for (std::ptrdiff_t i = rank * count / ranks; i < (rank + 1) * count / ranks; ++i) {
    const std::vector<int>& piece = pieces[static_cast<std::size_t>(i)];
    part.insert(part.end(), piece.begin(), piece.end());
  }
  std::ranges::sort(part);
  return part;
}

std::vector<int> cores_to_bind(int rank, int ranks, int threads) {
  if (ranks < 2 || threads < 2) return {};  // a rank without threads of its own binds none
  const std::vector<int> allowed = allowed_cores();
  if (std::ssize(allowed) < ::sysconf(_SC_NPROCESSORS_ONLN)) return {};
  std::vector<int> part = part_of_rank(places_of(allowed), rank, ranks);
  return std::ssize(part) < threads ? std::vector<int>() : part;
}

void bind_this_thread(std::span<const int> cores) {
  if (cores.empty()) return;
  const auto most = static_cast<std::size_t>(std::ranges::max(cores)) + 1;
  const CoreSet set(CPU_ALLOC(most));
  if (set == nullptr) return;
  const std::size_t bytes = CPU_ALLOC_SIZE(most);
  CPU_ZERO_S(bytes, set.get());
  for (const int core : cores) CPU_SET_S(static_cast<std::size_t>(core), bytes, set.get());
  static_cast<void>(::sched_setaffinity(0, bytes, set.get()));
}

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
      for (int i = 0; i < kSpins && epoch.load(std::memory_order_relaxed) == seen; ++i)
        pause_briefly();
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
    for (int i = 0; i < kSpins && running.load(std::memory_order_relaxed) != 0; ++i)
      pause_briefly();
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
  if (threads < 1)
    throw UsageError("A thread pool needs at least one thread, the caller's own; asked for: {}",
                     threads);
  state_->cores = std::move(cores);
  state_->workers.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i)
      state_->workers.emplace_back([state = state_.get()] { state->work(); });
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
  if (chunks == 1 || state_->workers.empty())
    loop.run();
  else
    state_->share(loop);
  state_->busy.store(false, std::memory_order_release);
  if (loop.failure) std::rethrow_exception(loop.failure);
}

}  // namespace strata
