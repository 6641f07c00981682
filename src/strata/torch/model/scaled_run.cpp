#include "strata/torch/model/scaled_run.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

namespace strata::torch {
namespace {

struct KnownRun {
  const ScaledRun* run;
  int graph_task;
  std::thread::id thread;
  double scale;
};

struct KnownRuns {
  std::mutex mutex;
  std::vector<KnownRun> runs;  // the latest last
};

// Never freed: autograd's threads may outlive static objects.
KnownRuns& known_runs() {
  static auto* const known = new KnownRuns;
  return *known;
}

}  // namespace

ScaledRun::ScaledRun(double scale) {
  const int graph_task = ::torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(known_runs().mutex);
  known_runs().runs.push_back({this, graph_task, std::this_thread::get_id(), scale});
}

ScaledRun::~ScaledRun() {
  const std::lock_guard lock(known_runs().mutex);
  std::erase_if(known_runs().runs, [this](const KnownRun& known) { return known.run == this; });
}

std::optional<double> ScaledRun::scale_here() {
  const int graph_task = ::torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(known_runs().mutex);
  const auto& runs = known_runs().runs;
  const auto found = std::find_if(runs.rbegin(), runs.rend(), [&](const KnownRun& known) {
    return known.graph_task == graph_task || known.thread == std::this_thread::get_id();
  });
  return found == runs.rend() ? std::nullopt : std::optional(found->scale);
}

}  // namespace strata::torch
