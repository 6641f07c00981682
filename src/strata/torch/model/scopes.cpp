#include "strata/torch/model/scopes.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <fmt/core.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "strata/torch/model/gradient_hooks.h"

namespace strata::torch {
namespace {

// Reports the time of one scope's forward or backward: as a span of the engine's recorder if the
// step is timed, and as a range of torch's profiler if that is on ("strata.forward
// model.layers.3"). If it is destroyed without end(), the recorder gets no span.
class ScopeRange {
 public:
  ScopeRange() = default;  // reports nothing
  ScopeRange(engine::StepRecorder& recorder, engine::Activity activity, int label) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      profiled_ = std::make_unique<at::RecordFunction>(std::move(*callbacks));
      profiled_->before(fmt::format("strata.{} {}", name_of(activity),
                                    recorder.labels().at(static_cast<std::size_t>(label))));
    }
    recording_ = recorder.begin(activity, label);
  }
  void end(engine::StepRecorder& recorder) {
    recorder.end(std::exchange(recording_, nullptr));
    profiled_.reset();
  }

 private:
  engine::StepRecorder::Recording recording_;
  std::unique_ptr<at::RecordFunction> profiled_;
};

}  // namespace

struct Scopes::Tracker : std::enable_shared_from_this<Scopes::Tracker> {
  // One backward life of a scope.
  struct Life {
    int scope = 0;
    bool holds = true;  // its units; else it only reports times
    ScopeRange range;
    enum { kWaiting, kRunning, kOver } state = kWaiting;
    bool may_run_again = false;  // the graph that ran was to be kept
    bool pending() const { return state != kOver || may_run_again; }
  };

  engine::Engine* engine = nullptr;  // null once the owner is gone
  struct Entered {
    std::uint64_t sequence = 0;  // autograd's number at enter()
    ScopeRange range;
    std::thread::id outer;  // `driver` before
  };
  std::vector<Scope> scopes;
  std::vector<int> labels;       // of the recorder, by scope
  std::vector<Entered> entered;  // innermost last
  std::vector<std::shared_ptr<Life>> running;
  std::vector<std::vector<std::weak_ptr<const Life>>> lives;  // by unit; they go with their graphs
  // The thread that is inside a scope's forward, a backward pass or a step; none: no thread is.
  std::atomic<std::thread::id> driver{};
  std::mutex reads_mutex;            // guards what follows
  std::vector<int> read_units;       // gathered by read() where a backward may follow
  std::vector<int> idle_read_units;  // gathered by read() under no_grad

  void acquire(int scope) {
    const auto& units = engine::nth(scopes, scope).units;
    for (std::size_t i = 0; i < units.size(); ++i) {
      try {
        engine->gatherer().acquire(units[i]);
      } catch (...) {
        while (i-- > 0) engine->gatherer().release(units[i]);
        throw;
      }
    }
  }
  void release(int scope) { release(engine::nth(scopes, scope).units); }
  void release(const std::vector<int>& units) {
    FirstError first;
    for (const int unit : units) first.attempt([&] { engine->gatherer().release(unit); });
    first.rethrow();
  }
  // Makes this thread the driver, after a read() that is under way. Returns the driver before it.
  std::thread::id claim() {
    const std::lock_guard lock(reads_mutex);
    return driver.exchange(std::this_thread::get_id());
  }
  // Autograd's threads work for the thread that waits for them.
  bool driven_by_another_thread() const {
    const std::thread::id id = driver;
    return id != std::thread::id() && id != std::this_thread::get_id() &&
           autograd::get_current_graph_task_id() < 0;
  }
  ScopeRange range(engine::Activity activity, int scope) const {
    return {engine->recorder(), activity, engine::nth(labels, scope)};
  }
  // Whether the scope has units that its backward must gather.
  bool sharded_in_backward(int scope) const {
    const Scope& s = engine::nth(scopes, scope);
    const auto& all = engine->weights().units();
    const auto sharded = [&](int unit) { return !engine::nth(all, unit).whole; };
    return s.read_in_backward && std::ranges::any_of(s.units, sharded);
  }
  void begin(const std::shared_ptr<Life>& life) {
    if (engine == nullptr || life->state == Life::kRunning) return;
    // Again after kOver if a graph is run twice (retain_graph).
    if (life->holds) acquire(life->scope);
    life->range = range(engine::Activity::kBackward, life->scope);
    life->state = Life::kRunning;
    life->may_run_again = autograd::get_current_graph_task_keep_graph();
    running.push_back(life);
    // Inputs without a producer never end the life. The end of this autograd pass does: of the
    // whole backward pass, or of the pass inside a reentrant checkpoint, whose inputs are all
    // detached.
    autograd::Engine::get_default_engine().queue_callback([tracker = weak_from_this(), life] {
      if (const auto t = tracker.lock()) t->end(life);
    });
  }
  void end(const std::shared_ptr<Life>& life) {
    if (engine == nullptr || life->state != Life::kRunning) return;
    life->state = Life::kOver;
    std::erase(running, life);
    FirstError first;
    first.attempt([&] { life->range.end(engine->recorder()); });
    if (life->holds) first.attempt([&] { release(life->scope); });
    first.rethrow();
  }
  void hang_hooks(int scope, std::uint64_t sequence, std::span<const at::Tensor> inputs,
                  std::span<const at::Tensor> outputs);
};

Scopes::Scopes(engine::Engine& engine, std::vector<Scope> scopes,
               std::function<void(std::span<const at::Tensor>)> on_outputs)
    : on_outputs_(std::move(on_outputs)), tracker_(std::make_shared<Tracker>()) {
  tracker_->engine = &engine;
  // On one rank, too, if weights are offloaded.
  gathers_ = std::ranges::any_of(engine.weights().units(),
                                 [](const engine::Unit& unit) { return !unit.whole; });
  for (const Scope& scope : scopes)
    tracker_->labels.push_back(engine.recorder().add_label(scope.name));
  tracker_->scopes = std::move(scopes);
  tracker_->lives.resize(engine.weights().units().size());
}

Scopes::~Scopes() {
  tracker_->engine = nullptr;
}

bool Scopes::needed(int) const {
  engine::Engine& engine = *tracker_->engine;
  return gathers_ || engine.collectives().world_size() > 1 || !engine.trace().path().empty();
}

void Scopes::enter(int scope) {
  Tracker& t = *tracker_;
  const std::thread::id outer = t.claim();
  bool acquired = false;
  try {
    t.acquire(scope);
    acquired = true;
    const auto activity =
        t.engine->in_backward() ? engine::Activity::kRecompute : engine::Activity::kForward;
    t.entered.push_back({at::sequence_number::peek(), t.range(activity, scope), outer});
  } catch (...) {
    if (acquired) failure_.attempt([&] { t.release(scope); });
    t.driver = outer;
    throw;
  }
}

void Scopes::abandon(int scope) noexcept {
  tracker_->driver = tracker_->entered.back().outer;
  tracker_->entered.pop_back();
  failure_.attempt([&] { tracker_->release(scope); });
}

void Scopes::leave(int scope, std::span<const at::Tensor> inputs,
                   std::span<const at::Tensor> outputs) {
  Tracker& t = *tracker_;
  Tracker::Entered entered = std::move(t.entered.back());
  t.entered.pop_back();
  FirstError first;
  first.attempt([&] {
    entered.range.end(t.engine->recorder());
    t.hang_hooks(scope, entered.sequence, inputs, outputs);
    if (t.entered.empty() && on_outputs_) on_outputs_(outputs);
  });
  first.attempt([&] { t.release(scope); });
  t.driver = entered.outer;
  first.rethrow();
}

void Scopes::Tracker::hang_hooks(int scope, std::uint64_t sequence,
                                 std::span<const at::Tensor> inputs,
                                 std::span<const at::Tensor> outputs) {
  const bool sharded = sharded_in_backward(scope);
  const bool watched = engine->recorder().timing() || at::hasCallbacks();
  if (!(sharded || watched) || !at::GradMode::is_enabled()) return;
  auto life = std::make_shared<Life>();
  life->scope = scope;
  life->holds = sharded;
  for (const int unit : sharded ? engine::nth(scopes, scope).units : std::vector<int>{}) {
    auto& of_unit = engine::nth(lives, unit);
    std::erase_if(of_unit, [](const auto& one) { return one.expired(); });
    of_unit.push_back(life);
  }
  const std::weak_ptr<Tracker> tracker = weak_from_this();
  // An input that was changed in place now has a node of this scope.
  const auto ours = [sequence](const autograd::Node* n) { return n->sequence_nr() >= sequence; };
  std::vector<autograd::Node*> before = producers(inputs, /*bases=*/false);
  std::erase_if(before, ours);
  std::vector<autograd::Node*> not_ours = producers(inputs, /*bases=*/true);
  std::erase_if(not_ours, ours);
  for (autograd::Node* node : producers(outputs, /*bases=*/true)) {
    // An output that is one of the inputs was not made here.
    if (std::ranges::count(not_ours, node) > 0) continue;
    run_before(*node, /*first=*/false, [tracker, life] {
      if (const auto t = tracker.lock()) t->begin(life);
    });
  }
  for (autograd::Node* node : before) {
    // The first of them to run ends the life, not the last: the blocks of a decoder share the
    // encoder's output, whose node runs when all blocks are over. Among nodes that are ready,
    // autograd runs the one that was made last. So when a node from before the scope runs, no node
    // of the scope is left. This hook goes in front of the others on the node: the node belongs to
    // the preceding scope, whose units another hook there gathers, and this scope's units should be
    // released by then.
    run_before(*node, /*first=*/true, [tracker, life] {
      if (const auto t = tracker.lock()) t->end(life);
    });
  }
}

bool Scopes::pending(int unit) const {
  return std::ranges::any_of(engine::nth(tracker_->lives, unit), [](const auto& one) {
    const auto life = one.lock();
    return life != nullptr && life->pending();
  });
}

void Scopes::read(int unit) {
  Tracker& t = *tracker_;
  const std::lock_guard lock(t.reads_mutex);
  if (t.driven_by_another_thread())
    throw UsageError(
        "a sharded parameter was read in a thread of its own while another thread runs forward, "
        "backward or step(), which gather in an order that all ranks share; read it in the thread "
        "that trains, or while that does none of these; found: the unit '{}'",
        engine::nth(t.engine->weights().units(), unit).name());
  if (std::ranges::count(t.read_units, unit) + std::ranges::count(t.idle_read_units, unit) > 0)
    return;
  t.engine->gatherer().acquire(unit);
  (at::GradMode::is_enabled() ? t.read_units : t.idle_read_units).push_back(unit);
}

void Scopes::end_reads(int unit) {
  Tracker& t = *tracker_;
  const std::lock_guard lock(t.reads_mutex);
  const auto held = std::erase(t.read_units, unit) + std::erase(t.idle_read_units, unit);
  for (std::size_t i = 0; i < held; ++i) t.engine->gatherer().release(unit);
}

void Scopes::release_idle_reads() {
  const std::lock_guard lock(tracker_->reads_mutex);
  tracker_->release(std::exchange(tracker_->idle_read_units, {}));
}

void Scopes::begin_backward() {
  tracker_->claim();
}

void Scopes::end_backward() {
  Tracker& t = *tracker_;
  FirstError first;
  const auto running = t.running;
  for (const auto& life : running) first.attempt([&] { t.end(life); });
  first.attempt([&] { release_idle_reads(); });
  t.driver = std::thread::id();
  first.rethrow();
}

void Scopes::end_micro_step() {
  FirstError first;
  first.attempt([&] { end_backward(); });
  first.attempt([&] {
    const std::lock_guard lock(tracker_->reads_mutex);
    tracker_->release(std::exchange(tracker_->read_units, {}));
  });
  first.rethrow();
}

std::shared_ptr<void> Scopes::claim() {
  tracker_->claim();
  return {nullptr, [tracker = tracker_](void*) { tracker->driver = std::thread::id(); }};
}

}  // namespace strata::torch
