#include "strata/torch/model/scope_range.h"

#include <fmt/core.h>

#include <utility>

namespace strata::torch {

ScopeRange::ScopeRange(engine::StepRecorder& recorder, engine::Activity activity, int label) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (callbacks) {
    profiled_ = std::make_unique<at::RecordFunction>(std::move(*callbacks));
    profiled_->before(fmt::format("strata.{} {}", name_of(activity),
                                  recorder.labels().at(static_cast<std::size_t>(label))));
  }
  recording_ = recorder.begin(activity, label);
}

void ScopeRange::end(engine::StepRecorder& recorder) {
  recorder.end(std::exchange(recording_, nullptr));
  profiled_.reset();
}

}  // namespace strata::torch
