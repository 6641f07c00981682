#include "strata/torch/model/scaled_pass.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

namespace strata::torch {
namespace {

struct ActivePass {
  const ScaledPass* run;
  int graph_task;
  std::thread::id thread;
  double scale;
};

struct ActivePasses {
  std::mutex mutex;
  std::vector<ActivePass> runs;  // the latest last
};

// Never freed: autograd's threads may outlive static objects.
ActivePasses& known_runs() {
  static auto* const known = new ActivePasses;
  return *known;
}

}  // namespace

ScaledPass::ScaledPass(double scale) {
  const int graph_task = ::torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(known_runs().mutex);
  known_runs().runs.push_back({this, graph_task, std::this_thread::get_id(), scale});
}

ScaledPass::~ScaledPass() {
  const std::lock_guard lock(known_runs().mutex);
  std::erase_if(known_runs().runs, [this](const ActivePass& known) { return known.run == this; });
}

std::optional<double> ScaledPass::scale_here() {
  const int graph_task = ::torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(known_runs().mutex);
  const auto& runs = known_runs().runs;
  const auto found = std::find_if(runs.rbegin(), runs.rend(), [&](const ActivePass& known) {
    return known.graph_task == graph_task || known.thread == std::this_thread::get_id();
  });
  return found == runs.rend() ? std::nullopt : std::optional(found->scale);
}

}  // namespace strata::torch
