// Training steps as Python shows them: the engine's report of a step, and its timeline.
#include "strata/engine/record/step_report.h"

#include <array>

#include "bindings.h"

namespace strata::python {
namespace {

using namespace py::literals;

py::dict transfers(const engine::StepReport& report) {
  using engine::StepTimes;
  using engine::StepTransfers;
  const auto transfer = [&](std::int64_t count, Bytes bytes, StepTransfers StepTimes::*kind) {
    const auto of = [&](double StepTransfers::*value) {
      return mapped(report.times, [&](const StepTimes& times) { return times.*kind.*value; });
    };
    return py::dict("count"_a = count, "bytes"_a = bytes.value,
                    "seconds"_a = of(&StepTransfers::seconds),
                    "exposed_seconds"_a = of(&StepTransfers::exposed),
                    "gb_per_s"_a = of(&StepTransfers::gb_per_s));
  };
  const engine::StepCounts& c = report.counts;
  return py::dict("gather"_a = transfer(c.gathers, c.gathered, &StepTimes::gather),
                  "reduce"_a = transfer(c.reductions, c.reduced, &StepTimes::reduce),
                  "refresh"_a = transfer(c.refreshes, c.refreshed, &StepTimes::refresh));
}

// {kind: {bytes, peak_bytes}} of the device, and "total".
py::dict device_memory(const memory::Ledger& ledger) {
  constexpr auto kDevice = memory::Tier::kDevice;
  py::dict result;
  const auto add = [&result](const std::string& name, Bytes held, Bytes peak) {
    if (peak.value == 0) return;
    result[py::str(name)] = py::dict("bytes"_a = held.value, "peak_bytes"_a = peak.value);
  };
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    add(std::string(name_of(kind)), ledger.held(kDevice, kind), ledger.peak(kDevice, kind));
  }
  add("total", ledger.held(kDevice), ledger.peak(kDevice));
  return result;
}

py::dict offload_dict(const engine::LinkReport& report, const offload::StoreCounts& stores) {
  constexpr std::array<const char*, offload::kLinkCount> kNames{"up", "down", "read", "write"};
  py::dict links;
  for (const engine::LinkUse& use : report.uses)
    links[kNames.at(static_cast<std::size_t>(use.link))] = py::dict(
        "bytes"_a = use.bytes.value, "seconds"_a = use.seconds, "gb_per_s"_a = use.gb_per_s,
        "limit_gb_per_s"_a = use.limit_gb_per_s, "of_limit"_a = use.of_limit());
  py::list drives;
  for (const offload::DriveWrites& each : report.drive_writes)
    drives.append(py::dict("folder"_a = each.folder, "written_bytes"_a = each.written.value));
  const auto lanes = [&](engine::LaneTime engine::LaneTimes::*lane) -> py::object {
    if (!report.lanes) return py::none();
    const engine::LaneTime time = *report.lanes.*lane;
    return py::dict("elements"_a = time.numel.value, "seconds"_a = time.seconds);
  };
  return py::dict("links"_a = links, "device_lane"_a = lanes(&engine::LaneTimes::device),
                  "host_lane"_a = lanes(&engine::LaneTimes::host),
                  "cached_bytes"_a = report.lanes ? report.lanes->cached.value : 0,
                  "fetch_wait_seconds"_a = stores.seconds_waited,
                  "copy_wait_seconds"_a = report.copy_wait, "parts"_a = stores.parts,
                  "parts_ready"_a = stores.parts_ready, "drives"_a = drives);
}

py::dict step_dict(const engine::StepReport& report) {
  using engine::StepTimes;
  const auto of = [&](auto part) { return mapped(report.times, part); };
  const engine::StepCounts& counts = report.counts;
  return py::dict(
      "step"_a = report.step, "seconds"_a = report.seconds,
      "forward_seconds"_a = of(&StepTimes::forward),
      "backward_seconds"_a = of(&StepTimes::backward), "update_seconds"_a = of(&StepTimes::update),
      "norm_seconds"_a = of(&StepTimes::norm), "optimizer_seconds"_a = of(&StepTimes::optimizer),
      "exposed_seconds"_a = of(&StepTimes::exposed), "transfers"_a = transfers(report),
      "uses"_a = py::dict("kept"_a = counts.kept, "prefetched"_a = counts.prefetch_hits,
                          "late"_a = counts.late_fetches),
      "device_allocations"_a = counts.device_allocations, "host_waits"_a = counts.host_waits);
}

// None before the first step is over.
py::object step_report(ShardedModel& model, bool wait) {
  const auto report = without_lock([&] { return model.engine().step_report(wait); });
  if (!report) return py::none();
  py::dict result = step_dict(*report);
  result["offload"] =
      report->links ? offload_dict(*report->links, report->counts.stores) : py::object(py::none());
  result["device_memory"] = device_memory(model.ledger());
  return result;
}

// The reports of the steps that the device has finished since the last call, without memory and
// links. `wait`: waits for all steps that were begun.
py::list take_step_reports(ShardedModel& model, bool wait) {
  engine::StepRecorder& recorder = model.engine().recorder();
  without_lock([&] { recorder.resolve(wait); });
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

void bind_steps(ModelClass& model) {
  model.def("step_report", &step_report)
      .def("record_steps", [](ShardedModel& m, bool on) { m.engine().recorder().set_timed(on); })
      .def_property_readonly(
          "known_grad_norm",
          [](ShardedModel& m) { return m.engine().gradient_check().known_norm(); })
      .def("keep_step_reports", [](ShardedModel& m) { m.engine().recorder().keep_records(); })
      .def("take_step_reports", &take_step_reports, py::arg("wait") = false)
      .def("trace_state", &trace_state)
      .def(
          "end_trace", [](ShardedModel& m) { m.engine().end_trace(); }, unlocked);
}

}  // namespace strata::python
