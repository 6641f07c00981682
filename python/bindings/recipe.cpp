// Recipes as Python records them, and the deferred tensors that they describe.
#include "strata/kernels/recipe.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <utility>

#include "bindings.h"
#include "strata/engine/checkpoint/weight_loader.h"
#include "strata/torch/base/deferred_tensor.h"
#include "strata/torch/base/dtype.h"
#include "strata/torch/base/host_threads.h"

namespace strata::python {
namespace {

using kernels::RecipeOp;
using kernels::RecipeStep;
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
  throw UsageError(fmt::format("'{}' is no step of a recipe", name));
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

}  // namespace

void bind_recipe(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Recipe>(module, "Recipe")
      .def(py::init<>())
      .def_static("from_steps", &recipe_from)
      .def("steps", &steps_of)
      .def("copy", [](const Recipe& recipe) { return Recipe(recipe); })
      .def("add", &add, py::arg("numel"), py::arg("op"), py::arg("a"), py::arg("b"), py::arg("key"),
           py::arg("region"))
      .def("write", &write, py::arg("target"), py::arg("begin"), py::arg("threads"),
           py::arg("world_size"), unlocked)
      .def("__len__", [](const Recipe& recipe) { return recipe.steps.size(); });
  module.def("deferred_tensor", &torch::deferred_tensor, py::arg("shape"), py::arg("dtype"),
             py::arg("device"), unlocked);
  module.def("back", &torch::back, py::arg("tensor"), py::arg("what"), unlocked);
  module.def("storage_of", &torch::storage_of, py::arg("tensor"));
  module.def("sharers", &torch::sharers, py::arg("tensor"));
}

void replay(torch::ShardedModel& model, const std::vector<RecipeTuple>& recipes) {
  std::vector<engine::ParamRecipe> list;
  for (const auto& [param, recipe, dtype] : recipes)
    list.push_back({param, recipe.steps, torch::from_scalar_type(dtype)});
  const engine::Config& config = model.config();
  const int world_size = model.engine().collectives().world_size();
  ThreadPool threads(torch::host_threads(config.strata.threads, world_size));
  engine::replay_weights(model.engine(), list, config.zero.partition_stream_chunk, threads);
  model.engine().weights_changed();
}

}  // namespace strata::python
