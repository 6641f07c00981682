// A model before it is under the engine: what the user built, the resources that it gets, and the
// plan that is made of it without memory. Plain data, which shares the user's tensors and the
// resources, and pure functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/units.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/engine/record/init_report.h"
#include "strata/forecast/auto_placement.h"
#include "strata/forecast/memory_forecast.h"
#include "strata/offload/state_store.h"
#include "strata/plan/block_search.h"
#include "strata/plan/param_spec.h"
#include "strata/plan/unit_plan.h"

namespace strata::torch {

// How the values of a parameter are lent. `use` gets flat elements from `begin` on, which are valid
// until it returns; if it queues work on the compute stream, until that work has run.
struct Borrowing {
  Bytes piece;            // the most that is brought from another rank, or from a drive, at once
  bool own_part = false;  // only the part that this rank's shard holds; the borrower needs no other
  bool may_be_whole = false;  // for a moment, on every rank: a gather is faster than many pieces
  std::function<void(Numel begin, const at::Tensor& values)> use;
};

// A model that has sharded a parameter already, as seen by the model that takes its shards over.
class ParameterOwner : public Interface {
 public:
  // Elements of a parameter that this rank's shard holds: [first, second).
  virtual std::pair<Numel, Numel> owned_range(int param) const = 0;
  // Whether its elements count in the order of the format channels_last.
  virtual bool channels_last(int /*param*/) const { return false; }
  // Collective. Calls borrowing.use() for all of a parameter's values.
  virtual void lend_values(int param, const Borrowing& borrowing) = 0;
  // Collective. The owner leaves its parameters empty and cannot be used any more.
  virtual void retire() = 0;
  // Called after all ranks have retired their owners: memory that peers have freed is only returned
  // when this rank unmaps it.
  virtual void unmap_freed() = 0;
};

// One parameter of the user's model.
struct ModelParameter {
  std::string name;
  at::Tensor variable;              // the user's tensor object
  std::vector<std::int64_t> shape;  // full
  bool has_values = true;           // false: born flat, values come from files
  int group = 0;                    // of the optimizer; -1: none trains it
  // Another model that has sharded this parameter already, and its index there. Its values are
  // taken over shard by shard; the owner retires when all its parameters are taken over.
  std::shared_ptr<ParameterOwner> owner;
  int owner_index = 0;
  std::optional<plan::TileOf>
      tile{};  // of a tile; the owner has the parameter that it is a part of
  std::optional<plan::UpdateRule> rule{};  // absent: that of the job's optimizer
  // Absent: as the configuration says of parameters like it.
  std::optional<plan::StateForm> states{};
  bool matrices_apart = false;  // ParamSpec has these
  double matrix_cost = 0.0;

  // Not from files, and not from another model.
  bool has_own_values() const { return has_values && owner == nullptr; }
};

// A model as the user built it: its parameters by name, and its tree of modules.
struct ModelInput {
  std::vector<ModelParameter> parameters;
  plan::ModuleTree tree;
};

// A model's plan from its description and a configuration: the parameters' specs, the units and
// scopes.
struct PlannedModel {
  std::vector<plan::ParamSpec> specs;  // in the dtype that they compute in
  plan::ModelPlan plan;
  plan::ModuleTree tree;
};

// `room`: the bytes that a rank may hold, the same on all ranks; used if the configuration leaves
// placement to the engine. Errors: ConfigError for a trainable parameter whose dtype cannot be
// trained; OutOfMemoryError of forecast::place_automatically().
PlannedModel plan_model(const ModelInput& input, const engine::Config& config,
                        const forecast::Trainers& trainers, const forecast::Room& room);

// The resources of a model. Several models of one rank may share a runtime, and with it the
// device's streams and kernels. `collectives` carry memory of `device`, which is the engine's view
// of `place`; null until the ranks are connected.
struct ModelRuntime {
  c10::Device place{c10::DeviceType::CPU};
  std::shared_ptr<comm::Collectives> collectives;
  std::shared_ptr<device::Device> device;
  // Null: the configuration places the states.
  std::shared_ptr<offload::StateStore> states = nullptr;
  engine::InitReport::Progress progress{};  // of start-up; may be empty
  int threads = 1;                          // that work on host memory
  // Receives warnings for the user at the start, on rank 0; empty: they become torch's warnings.
  std::function<void(const std::string&)> warn{};
};

// `threads`: that work on host memory (placement.h).
ModelRuntime make_runtime(c10::Device place, int threads,
                          std::shared_ptr<comm::Collectives> collectives = nullptr);

}  // namespace strata::torch
