// Training steps as Python shows them: the engine's report of a step, and its timeline.
#include "strata/engine/record/step_report.h"

#include <array>
#include <string_view>

#include "bindings.h"

namespace strata::python {
namespace {

using torch::ShardedModel;

py::dict transfer(std::int64_t count, Bytes bytes, const engine::StepTransfers* times) {
  py::dict result;
  result["count"] = count;
  result["bytes"] = bytes.value;
  result["seconds"] = times ? py::cast(times->seconds) : py::none();
  result["exposed_seconds"] = times ? py::cast(times->exposed) : py::none();
  result["gb_per_s"] = times ? py::cast(times->gb_per_s) : py::none();
  return result;
}

py::dict transfers(const engine::StepReport& report) {
  const engine::StepCounts& c = report.counts;
  const engine::StepTimes* times = report.times ? &*report.times : nullptr;
  py::dict result;
  result["gather"] = transfer(c.gathers, c.gathered, times ? &times->gather : nullptr);
  result["reduce"] = transfer(c.reductions, c.reduced, times ? &times->reduce : nullptr);
  result["refresh"] = transfer(c.refreshes, c.refreshed, times ? &times->refresh : nullptr);
  return result;
}

// {kind: {bytes, peak_bytes}} of the device, and "total".
py::dict device_memory(const memory::Ledger& ledger) {
  constexpr auto kDevice = memory::Tier::kDevice;
  py::dict result;
  const auto add = [&result](const std::string& name, Bytes held, Bytes peak) {
    if (peak.value == 0) return;
    py::dict entry;
    entry["bytes"] = held.value;
    entry["peak_bytes"] = peak.value;
    result[py::str(name)] = entry;
  };
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    add(std::string(name_of(kind)), ledger.held(kDevice, kind), ledger.peak(kDevice, kind));
  }
  add("total", ledger.held(kDevice), ledger.peak(kDevice));
  return result;
}

py::dict link(const engine::LinkUse& use) {
  py::dict result;
  result["bytes"] = use.bytes.value;
  result["seconds"] = use.seconds;
  result["gb_per_s"] = use.gb_per_s;
  result["limit_gb_per_s"] = use.limit_gb_per_s;
  result["of_limit"] = use.of_limit();
  return result;
}

std::string_view name_of(offload::Link link) {
  constexpr std::array<std::string_view, offload::kLinkCount> kNames{"up", "down", "read", "write"};
  return kNames.at(static_cast<std::size_t>(link));
}

py::dict offload_dict(const engine::LinkReport& report) {
  py::dict links;
  for (const engine::LinkUse& use : report.uses) links[py::cast(name_of(use.link))] = link(use);
  py::list drives;
  for (const offload::DriveWrites& each : report.drive_writes) {
    py::dict drive;
    drive["folder"] = each.folder;
    drive["written_bytes"] = each.written.value;
    drives.append(drive);
  }
  py::dict result;
  result["links"] = links;
  result["fetch_wait_seconds"] = report.fetch_wait;
  result["copy_wait_seconds"] = report.copy_wait;
  result["parts"] = report.parts;
  result["parts_ready"] = report.parts_ready;
  result["drives"] = drives;
  return result;
}

py::dict step_dict(const engine::StepReport& report) {
  const engine::StepTimes* times = report.times ? &*report.times : nullptr;
  const auto seconds = [times](double engine::StepTimes::*part) {
    return times ? py::cast(times->*part) : py::object(py::none());
  };
  py::dict result;
  result["step"] = report.step;
  result["seconds"] = report.seconds;
  result["forward_seconds"] = seconds(&engine::StepTimes::forward);
  result["backward_seconds"] = seconds(&engine::StepTimes::backward);
  result["update_seconds"] = seconds(&engine::StepTimes::update);
  result["norm_seconds"] = seconds(&engine::StepTimes::norm);
  result["optimizer_seconds"] = seconds(&engine::StepTimes::optimizer);
  result["exposed_seconds"] = times ? py::cast(times->exposed()) : py::object(py::none());
  result["transfers"] = transfers(report);
  py::dict uses;
  uses["kept"] = report.counts.kept;
  uses["prefetched"] = report.counts.prefetch_hits;
  uses["late"] = report.counts.late_fetches;
  result["uses"] = uses;
  result["device_allocations"] = report.counts.device_allocations;
  result["host_waits"] = report.counts.host_waits;
  return result;
}

py::dict as_dict(const engine::StepReport& report, const memory::Ledger& ledger) {
  py::dict result = step_dict(report);
  result["offload"] = report.links ? offload_dict(*report.links) : py::object(py::none());
  result["device_memory"] = device_memory(ledger);
  return result;
}

// None before the first step is over.
py::object step_report(ShardedModel& model, bool wait) {
  std::optional<engine::StepReport> report;
  {
    const py::gil_scoped_release release;
    report = model.engine().step_report(wait);
  }
  if (!report) return py::none();
  return as_dict(*report, model.ledger());
}

// The reports of the steps that the device has finished since the last call, without memory and
// links. `wait`: waits for all steps that were begun.
py::list take_step_reports(ShardedModel& model, bool wait) {
  engine::StepRecorder& recorder = model.engine().recorder();
  {
    const py::gil_scoped_release release;
    recorder.resolve(wait);
  }
  const int ranks = model.engine().collectives().shard_position().held_count();
  py::list reports;
  for (const engine::StepRecord& record : recorder.take_kept())
    reports.append(step_dict(engine::make_step_report(record, ranks)));
  return reports;
}

// (whether the trace is written or given up, the reason if it could not be written, or "")
std::pair<bool, std::string> trace_state(ShardedModel& model) {
  const engine::StepTrace& trace = model.engine().trace();
  return {trace.over(), trace.problem()};
}

}  // namespace

void bind_steps(py::class_<ShardedModel, std::shared_ptr<ShardedModel>>& model) {
  model.def("step_report", &step_report, py::arg("wait"))
      .def("record_steps", [](ShardedModel& m, bool on) { m.engine().recorder().set_timed(on); })
      // The norm of the last step whose norm is known; does not wait for the device.
      .def_property_readonly("known_grad_norm",
                             [](ShardedModel& m) { return m.engine().known_grad_norm(); })
      .def("keep_step_reports", [](ShardedModel& m) { m.engine().recorder().keep_records(); })
      .def("take_step_reports", &take_step_reports, py::arg("wait") = false)
      .def("trace_state", &trace_state)
      .def(
          "end_trace", [](ShardedModel& m) { m.engine().end_trace(); },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace strata::python
