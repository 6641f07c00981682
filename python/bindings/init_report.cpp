// What Python shows of start-up: the engine's account of its phases, progress, and the link.
#include "strata/engine/record/init_report.h"

#include "bindings.h"
#include "strata/base/error.h"
#include "strata/engine/record/link_speed.h"
#include "strata/torch/base/placement.h"

namespace strata::python {

using torch::ShardedModel;

std::shared_ptr<py::function> held(py::function function) {
  return {new py::function(std::move(function)), [](py::function* last) {
            const py::gil_scoped_acquire acquire;
            delete last;
          }};
}

engine::InitReport::Progress progress_from(const py::object& function) {
  if (function.is_none()) return {};
  const auto call = held(py::cast<py::function>(function));
  return [call](const std::string& phase, Bytes done, Bytes total) {
    const py::gil_scoped_acquire acquire;
    (*call)(phase, done.value, total.value);
  };
}

// {way, reason, cached, buffered_gb_per_s, direct_gb_per_s}, None for what is not known; None where
// no files were read.
py::object reading_of(const engine::InitReport& report) {
  if (!report.reading()) return py::none();
  const io::ReadChoice& choice = *report.reading();
  py::dict entry;
  entry["way"] = choice.direct ? "direct" : "buffered";
  entry["reason"] = choice.reason;
  entry["cached"] = choice.figures.cached;
  entry["buffered_gb_per_s"] = choice.figures.buffered_gb_per_s;
  entry["direct_gb_per_s"] = choice.figures.direct_gb_per_s;
  return entry;
}

// {tier, reason, reading, phases: [{name, seconds, bytes}], device_growth_bytes, pinned_bytes}
py::dict init_report(ShardedModel& model) {
  const engine::InitReport& report = model.engine().init_report();
  py::list phases;
  for (const engine::InitPhase& phase : report.phases()) {
    py::dict entry;
    entry["name"] = phase.name;
    entry["seconds"] = phase.seconds;
    entry["bytes"] = phase.bytes.value;
    phases.append(entry);
  }
  // Host memory is pinned for the sake of a link, so there is none where there is no link.
  const Bytes staging = model.ledger().peak(memory::Tier::kHost, memory::Kind::kStaging);
  py::dict result;
  result["tier"] = report.tier();
  result["reason"] = report.reason();
  result["reading"] = reading_of(report);
  result["phases"] = phases;
  result["device_growth_bytes"] = report.device_growth().value;
  result["pinned_bytes"] = model.place().is_cpu() ? 0 : staging.value;
  return result;
}

std::optional<double> measure_link(ShardedModel& model) {
  if (model.place().is_cpu()) return std::nullopt;
  try {
    // A device of its own, so that the model's ledger does not count the sample.
    return engine::measure_link(*torch::make_device(model.place(), 1)).up_gb_per_s;
  } catch (const OutOfMemoryError&) {
    return std::nullopt;
  }
}

}  // namespace strata::python
