#include "device/late_stream.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <iterator>
#include <utility>

#include "strata/base/error.h"

namespace strata::device {
namespace {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

constexpr timespec kLookAgain{0, 1'000'000};

// Sleeps while the word has the value that was seen, at most for the given time (null: for ever).
// Flags are shared between mappings of one file; the system recognizes a flag by the file's pages.
void sleep_on(const Word& word, std::uint32_t seen, const timespec* most) {
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, most, nullptr, 0);
}

void wake_all(const Word& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

class LateEvent final : public TimedEvent {
 public:
  LateEvent(std::shared_ptr<LateChip> chip, LatePoint& point)
      : chip_(std::move(chip)), point_(point) {}

  LatePoint& point() const { return point_; }
  bool done() override { return point_.reached(); }
  void wait() override {
    chip_->waits().note();
    point_.wait();
  }
  double seconds_since(TimedEvent& earlier) override {
    const auto* other = dynamic_cast<const LateEvent*>(&earlier);
    STRATA_ASSERT(other != nullptr && point_.reached() && other->point_.reached());
    return std::chrono::duration<double>(point_.time() - other->point_.time()).count();
  }

 private:
  std::shared_ptr<LateChip> chip_;
  LatePoint& point_;
};

}  // namespace

void LatePoint::reach() {
  time_ = std::chrono::steady_clock::now();
  reached_.store(1, std::memory_order_release);
  wake_all(reached_);
}

void LatePoint::wait() {
  while (!reached()) sleep_on(reached_, 0, nullptr);
}

LateWorker::LateWorker(std::uint64_t seed)
    : random_(seed), last_(new Node), first_(last_), thread_([this] { run(); }) {}

LateWorker::~LateWorker() {
  push(nullptr);
  thread_.join();
  delete first_;
}

void LateWorker::push(LateTask task) {
  Node* const node = new Node{std::move(task)};
  last_->next.store(node, std::memory_order_release);
  last_ = node;
  pushed_.fetch_add(1, std::memory_order_release);
  wake_all(pushed_);
}

LateWorker::Node* LateWorker::take() {
  for (;;) {
    const std::uint32_t seen = pushed_.load(std::memory_order_acquire);
    if (Node* const next = first_->next.load(std::memory_order_acquire)) {
      delete std::exchange(first_, next);
      return next;
    }
    sleep_on(pushed_, seen, nullptr);
  }
}

void LateWorker::run() {
  for (Node* node = take(); node->task; node = take()) {
    dawdle();
    node->task(hands_);
    node->task = nullptr;
  }
}

// Sometimes at once, sometimes so late that the host and all other streams are far ahead.
void LateWorker::dawdle() {
  if (until_change_-- == 0) {
    until_change_ = static_cast<int>(random_() % 16);
    pace_ = random_() % 3 == 0 ? 0 : std::uint64_t{1} << random_() % 9;
  }
  const std::uint64_t turns = pace_ == 0 ? 0 : random_() % (2 * pace_);
  for (std::uint64_t i = 0; i < turns; ++i) std::this_thread::yield();
}

LateMemoryMap& LateMemoryMap::of_process() {
  static LateMemoryMap map;
  return map;
}

void LateMemoryMap::add(std::span<const std::byte> memory, Reach reach) {
  if (memory.empty()) return;
  const std::lock_guard lock(mutex_);
  ranges_[memory.data()] = {memory.data() + memory.size(), reach};
}

void LateMemoryMap::forget(std::span<const std::byte> memory) {
  const std::lock_guard lock(mutex_);
  if (!memory.empty()) ranges_.erase(memory.data());
}

LateMemoryMap::Reach LateMemoryMap::reach_of(const void* place) const {
  const auto* const pointer = static_cast<const std::byte*>(place);
  const std::lock_guard lock(mutex_);
  const auto after = ranges_.upper_bound(pointer);
  if (after == ranges_.begin()) return Reach::kOrdinary;
  const Range& range = std::prev(after)->second;
  return pointer < range.end ? range.reach : Reach::kOrdinary;
}

LatePoint& LateChip::make_point() {
  const std::lock_guard lock(mutex_);
  return points_.emplace_back();
}

std::unique_ptr<LateWorker> LateChip::make_worker() {
  const std::lock_guard lock(mutex_);
  return std::make_unique<LateWorker>(seed_++);
}

void LateChip::retire(std::unique_ptr<LateWorker> worker) {
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(worker));
}

LateStream::LateStream(std::shared_ptr<LateChip> chip)
    : chip_(std::move(chip)), worker_(chip_->make_worker()) {}

LateStream::~LateStream() {
  chip_->retire(std::move(worker_));
}

std::unique_ptr<TimedEvent> LateStream::record_timed() {
  LatePoint& point = chip_->make_point();
  push([&point](CpuDevice&) { point.reach(); });
  return std::make_unique<LateEvent>(chip_, point);
}

std::unique_ptr<Event> LateStream::record() {
  return record_timed();
}

void LateStream::wait_for(Event& event) {
  const auto* ours = dynamic_cast<const LateEvent*>(&event);
  STRATA_ASSERT(ours != nullptr);
  push([&point = ours->point()](CpuDevice&) { point.wait(); });
}

void LateStream::synchronize() {
  record()->wait();
}

void LateStream::finish() {
  LatePoint& point = chip_->make_point();
  push([&point](CpuDevice&) { point.reach(); });
  point.wait();
}

void await_flag(const Flag& flag, std::uint32_t value) {
  constexpr int kLooks = 50;
  for (int looks = 0;; ++looks) {
    const std::uint32_t seen = flag.load(std::memory_order_acquire);
    if (reached(seen, value)) return;
    if (looks < kLooks) {
      std::this_thread::yield();
    } else {
      sleep_on(flag, seen, &kLookAgain);
    }
  }
}

void raise_flag(Flag& flag, std::uint32_t value) {
  flag.store(value, std::memory_order_release);
  wake_all(flag);
}

}  // namespace strata::device
