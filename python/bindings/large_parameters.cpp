// Parameters that no rank could hold whole: their recipes as Python records them, the deferred
// tensors that recipes describe, and tiles, how they are cut and used one after the other.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <array>
#include <utility>

#include "bindings.h"
#include "strata/engine/checkpoint/weight_loader.h"
#include "strata/kernels/recipe.h"
#include "strata/plan/param_spec.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::python {
namespace {

using kernels::RecipeOp;
using kernels::RecipeStep;

// An object of its own in Python, which a vector would not be.
struct Recipe {
  kernels::Recipe steps;
};
// (parameter, recipe, dtype of the values)
using RecipeTuple = std::tuple<int, Recipe, at::ScalarType>;
// (first element, elements of a run, elements from run to run, runs)
using RegionTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
// (operation, a, b, key, region), as pickles and ranks exchange it
using StepTuple = std::tuple<int, float, float, std::uint64_t, RegionTuple>;

constexpr std::array<std::pair<const char*, RecipeOp>, 8> kOps{{{"fill", RecipeOp::kFill},
                                                                {"uniform", RecipeOp::kUniform},
                                                                {"normal", RecipeOp::kNormal},
                                                                {"add", RecipeOp::kAdd},
                                                                {"multiply", RecipeOp::kMultiply},
                                                                {"divide", RecipeOp::kDivide},
                                                                {"clamp", RecipeOp::kClamp},
                                                                {"erfinv", RecipeOp::kErfinv}}};

RecipeOp op_from(const std::string& name) {
  for (const auto& [known, op] : kOps) {
    if (name == known) return op;
  }
  throw UsageError("'{}' is no step of a recipe", name);
}

// A step that writes all elements makes the steps before it superfluous.
void add(Recipe& object, std::int64_t numel, const std::string& op, double a, double b,
         std::uint64_t key, const RegionTuple& region) {
  kernels::Recipe& recipe = object.steps;
  const auto [begin, length, stride, rows] = region;
  const RecipeStep step{op_from(op),
                        static_cast<float>(a),
                        static_cast<float>(b),
                        key,
                        {Numel(begin), Numel(length), Numel(stride), rows}};
  const bool writes =
      step.op == RecipeOp::kFill || step.op == RecipeOp::kUniform || step.op == RecipeOp::kNormal;
  if (writes && begin == 0 && length == numel) recipe.clear();
  recipe.push_back(step);
}

std::vector<StepTuple> steps_of(const Recipe& recipe) {
  std::vector<StepTuple> steps;
  for (const RecipeStep& step : recipe.steps) {
    const kernels::Region& region = step.region;
    steps.emplace_back(
        static_cast<int>(step.op), step.a, step.b, step.key,
        RegionTuple{region.begin.value, region.length.value, region.stride.value, region.rows});
  }
  return steps;
}

Recipe recipe_from(const std::vector<StepTuple>& steps) {
  Recipe recipe;
  for (const auto& [op, a, b, key, region] : steps) {
    const auto [begin, length, stride, rows] = region;
    STRATA_ASSERT(op >= 0 && op < static_cast<int>(kOps.size()));
    recipe.steps.push_back(
        {static_cast<RecipeOp>(op), a, b, key, {Numel(begin), Numel(length), Numel(stride), rows}});
  }
  return recipe;
}

// `target`: on the host, contiguous; gets elements from `begin` on.
void write(const Recipe& recipe, const at::Tensor& target, std::int64_t begin,
           std::optional<int> threads, int world_size) {
  STRATA_ASSERT(target.is_cpu() && target.is_contiguous());
  ThreadPool pool(torch::host_threads(threads, world_size));
  kernels::replay(recipe.steps, Numel(begin), Numel(target.numel()),
                  static_cast<std::byte*>(target.mutable_data_ptr()),
                  torch::from_scalar_type(target.scalar_type()), &pool);
}

// Collective: makes the values of parameters that were described without some.
void replay(ShardedModel& model, const std::vector<RecipeTuple>& recipes) {
  std::vector<engine::ParamRecipe> list;
  for (const auto& [param, recipe, dtype] : recipes)
    list.push_back({param, recipe.steps, torch::from_scalar_type(dtype)});
  const engine::Config& config = model.config();
  const int world_size = model.engine().collectives().world_size();
  ThreadPool threads(torch::host_threads(config.strata.threads, world_size));
  engine::replay_weights(model.engine(), list, config.zero.partition_stream_chunk, threads);
  model.engine().weights_changed();
}

// (first row, one past the last)
using RowTuple = std::pair<std::int64_t, std::int64_t>;

std::vector<RowTuple> cut_rows(const std::string& name, std::int64_t rows, std::int64_t row_bytes,
                               std::int64_t most) {
  std::vector<RowTuple> result;
  for (const plan::RowRange& tile : plan::cut_rows(name, rows, Bytes(row_bytes), Bytes(most)))
    result.emplace_back(tile.begin, tile.end);
  return result;
}

void require_tiles(const std::string& name, std::int64_t rows, std::int64_t row_bytes,
                   std::int64_t most, const std::vector<RowTuple>& tiles) {
  std::vector<plan::RowRange> ranges;
  for (const auto& [begin, end] : tiles) ranges.push_back({begin, end});
  plan::require_tiles(name, rows, Bytes(row_bytes), Bytes(most), ranges);
}

int unit_of(ShardedModel& model, int param) {
  return model.engine().weights().unit_of(param).id;
}

// The tile's values, whole until end_tile().
at::Tensor begin_tile(ShardedModel& model, int param) {
  model.engine().gatherer().acquire(unit_of(model, param));
  return model.parameters().full_view(param);
}

void end_tile(ShardedModel& model, int param) {
  if (model.alive()) model.engine().gatherer().release(unit_of(model, param));
}

// Whether the values of these consecutive tiles of one parameter lie side by side in this rank's
// memory and stay there.
bool lie_together(ShardedModel& model, int first, int last) {
  const engine::Weights& weights = model.engine().weights();
  const std::byte* next = nullptr;
  for (int param = first; param <= last; ++param) {
    const engine::Unit& unit = weights.unit_of(param);
    if (!unit.whole || unit.resident.empty()) return false;
    if (next != nullptr && unit.resident.data() != next) return false;
    next =
        unit.resident.data() + bytes_of(weights.param(param).numel(), unit.layout.dtype()).size();
  }
  return true;
}

// The values of adjacent tiles as one tensor, valid until each one's end_tile().
at::Tensor begin_tiles(ShardedModel& model, int first, int last) {
  std::int64_t rows = 0;
  int begun = first;
  try {
    for (; begun <= last; ++begun) rows += begin_tile(model, begun).size(0);
  } catch (...) {
    while (begun-- > first) end_tile(model, begun);
    throw;
  }
  const at::Tensor& view = model.parameters().full_view(first);
  std::vector<std::int64_t> shape = view.sizes().vec();
  shape.front() = rows;
  return at::for_blob(view.data_ptr(), shape)
      .options(view.options())
      .target_device(view.device())
      .make_tensor();
}

void bind_recipes(py::module_& module) {
  py::class_<Recipe>(module, "Recipe")
      .def(py::init<>())
      .def_static("from_steps", &recipe_from)
      .def("steps", &steps_of)
      .def("copy", [](const Recipe& recipe) { return Recipe(recipe); })
      .def("add", &add)
      .def("write", &write, unlocked)
      .def("__len__", [](const Recipe& recipe) { return recipe.steps.size(); });
  module.def("deferred_tensor", &torch::deferred_tensor, unlocked);
  module.def("back", &torch::back, unlocked);
  module.def("storage_of", &torch::storage_of);
  module.def("sharers", &torch::sharers);
}

}  // namespace

void bind_large_parameters(py::module_& module, ModelClass& model) {
  bind_recipes(module);
  module.def("cut_rows", &cut_rows);
  module.def("require_tiles", &require_tiles);
  module.def("wants_tiles", [](const std::string& name, std::int64_t bytes, std::int64_t most,
                               const std::vector<std::string>& patterns) {
    return plan::wants_tiles(name, Bytes(bytes), Bytes(most), patterns);
  });
  model.def("replay", &replay, unlocked)
      .def("begin_tile", &begin_tile, unlocked)
      .def("end_tile", &end_tile, unlocked)
      .def("lie_together", &lie_together)
      .def("begin_tiles", &begin_tiles, unlocked)
      // Called in place of begin_tile() and end_tile() by a rank that does not need the tile, if
      // gathers are one-sided.
      .def(
          "leave_out_tile",
          [](ShardedModel& m, int p) { m.engine().gatherer().leave_out(unit_of(m, p)); }, unlocked)
      .def(
          "take_gradient",
          [](ShardedModel& m, int p, const at::Tensor& g) { m.passes().gradients().take(p, g); },
          unlocked)
      .def(
          "begin_gradient",
          [](ShardedModel& m, int p) { return m.passes().gradients().begin_take(p); }, unlocked)
      .def(
          "end_gradient", [](ShardedModel& m, int p) { m.passes().gradients().end_take(p); },
          unlocked)
      .def_property_readonly(
          "gathers_alone",
          [](ShardedModel& m) { return m.engine().collectives().traits().one_sided; })
      .def("known_name", [](ShardedModel& m, int param) {
        return m.engine().weights().param(param).known_name();
      });
}

}  // namespace strata::python
