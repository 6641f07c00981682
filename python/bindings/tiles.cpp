// Tiles of parameters: how they are cut, and how Python uses one after the other.
#include <ATen/ops/from_blob.h>

#include "bindings.h"
#include "strata/plan/tile_plan.h"

namespace strata::python {
namespace {

using torch::ShardedModel;

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

// Called in place of begin_tile() and end_tile() by a rank that does not need the tile, if gathers
// are one-sided.
void leave_out_tile(ShardedModel& model, int param) {
  model.engine().gatherer().leave_out(unit_of(model, param));
}

void take_gradient(ShardedModel& model, int param, const at::Tensor& gradient) {
  model.passes().gradients().take(param, gradient);
}

// (where to write the tile's gradient, whether to add it to the values there, its factor), valid
// until end_gradient().
std::tuple<at::Tensor, bool, double> begin_gradient(ShardedModel& model, int param) {
  const auto destination = model.passes().gradients().begin_take(param);
  return {destination.place, destination.holds, destination.factor};
}

void end_gradient(ShardedModel& model, int param) {
  model.passes().gradients().end_take(param);
}

}  // namespace

void bind_tiles(py::module_& module,
                py::class_<ShardedModel, std::shared_ptr<ShardedModel>>& model) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("cut_rows", &cut_rows, py::arg("name"), py::arg("rows"), py::arg("row_bytes"),
             py::arg("most"));
  module.def("require_tiles", &require_tiles, py::arg("name"), py::arg("rows"),
             py::arg("row_bytes"), py::arg("most"), py::arg("tiles"));
  module.def(
      "wants_tiles",
      [](const std::string& name, std::int64_t bytes, std::int64_t most,
         const std::vector<std::string>& patterns) {
        return plan::wants_tiles(name, Bytes(bytes), Bytes(most), patterns);
      },
      py::arg("name"), py::arg("bytes"), py::arg("most"), py::arg("patterns"));
  model.def("begin_tile", &begin_tile, py::arg("parameter"), unlocked)
      .def("end_tile", &end_tile, py::arg("parameter"), unlocked)
      .def("lie_together", &lie_together, py::arg("first"), py::arg("last"))
      .def("begin_tiles", &begin_tiles, py::arg("first"), py::arg("last"), unlocked)
      .def("leave_out_tile", &leave_out_tile, py::arg("parameter"), unlocked)
      .def("take_gradient", &take_gradient, py::arg("parameter"), py::arg("gradient"), unlocked)
      .def("begin_gradient", &begin_gradient, py::arg("parameter"), unlocked)
      .def("end_gradient", &end_gradient, py::arg("parameter"), unlocked)
      // Whether a rank can gather without calls on the others.
      .def_property_readonly(
          "gathers_alone",
          [](ShardedModel& m) { return m.engine().collectives().traits().one_sided; })
      // The name that users and checkpoints use: of the parameter that this one is a tile of, else
      // its own.
      .def("known_name", [](ShardedModel& m, int param) {
        return m.engine().weights().param(param).known_name();
      });
}

}  // namespace strata::python
