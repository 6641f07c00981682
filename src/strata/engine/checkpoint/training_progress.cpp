#include "strata/engine/checkpoint/training_progress.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/optimize/adam_optimizer.h"

namespace strata::engine {
namespace {

using Json = nlohmann::json;

// Runs `read`, and says of which checkpoint a member is not what it should be.
template <typename Read>
void reading(std::string_view path, Read&& read) {
  try {
    read();
  } catch (const Json::exception& error) {
    throw FormatError(
        fmt::format("the training state of a checkpoint is not as Strata writes it: {}: path={}",
                    error.what(), path));
  }
}

}  // namespace

std::string with_progress(std::string_view training, Engine& engine, const StepControl& control) {
  Json json = Json::parse(training);
  const StepControl::State state = control.state();
  json["global_steps"] = state.global_steps;
  json["micro_steps"] = state.micro_steps;
  json["micro_batches"] = state.micro_batches;
  json["skipped_steps"] = state.skipped_steps;
  json["loss_scale"] = state.loss_scale.scale;
  json["loss_scaler"] = {{"scale", state.loss_scale.scale},
                         {"iteration", state.loss_scale.iteration},
                         {"last_overflow", state.loss_scale.last_overflow},
                         {"hysteresis_left", state.loss_scale.hysteresis_left}};
  if (const auto* adam = dynamic_cast<AdamOptimizer*>(engine.optimizer())) {
    Json missed = Json::object();
    for (int p = 0; p < engine.weights().param_count(); ++p) {
      const std::int64_t steps = adam->steps() - adam->steps_of(p);
      if (steps != 0) missed[engine.weights().param(p).known_name()] = steps;
    }
    json["optimizer_steps"] = {{"all", adam->steps()}, {"missed", std::move(missed)}};
  }
  return json.dump();
}

void restore_progress(std::string_view training, StepControl& control, std::string_view path) {
  reading(path, [&] {
    const Json json = Json::parse(training);
    StepControl::State state = control.state();
    state.global_steps = json.value("global_steps", std::int64_t{0});
    state.micro_steps = json.value("micro_steps", std::int64_t{0});
    state.micro_batches = json.value("micro_batches", state.micro_steps);
    state.skipped_steps = json.value("skipped_steps", std::int64_t{0});
    const auto scaler = json.find("loss_scaler");
    if (scaler != json.end() && control.loss_scaler().dynamic()) {
      state.loss_scale = {scaler->at("scale"), scaler->at("iteration"), scaler->at("last_overflow"),
                          scaler->at("hysteresis_left")};
    }
    control.set_state(state);
  });
}

void restore_optimizer_steps(std::string_view training, Engine& engine, std::string_view path) {
  auto* const adam = dynamic_cast<AdamOptimizer*>(engine.optimizer());
  if (adam == nullptr) return;
  reading(path, [&] {
    const Json json = Json::parse(training);
    const Json steps = json.value("optimizer_steps", Json::object());
    const std::int64_t all = steps.value("all", json.value("global_steps", std::int64_t{0}));
    const Json missed = steps.value("missed", Json::object());
    std::vector<std::int64_t> by_param;
    for (int p = 0; p < engine.weights().param_count(); ++p)
      by_param.push_back(all -
                         missed.value(engine.weights().param(p).known_name(), std::int64_t{0}));
    adam->set_steps(all, by_param);
  });
}

}  // namespace strata::engine
