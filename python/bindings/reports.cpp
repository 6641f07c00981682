// Start-up as Python shows it: the engine's report of its phases, the progress, and the link's
// speed; and training steps: the engine's report of a step, and its timeline.
#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <map>

#include "bindings.h"
#include "strata/base/error.h"
#include "strata/engine/optimize/native_optimizer.h"
#include "strata/engine/record/init_report.h"
#include "strata/engine/record/links.h"
#include "strata/engine/record/step_report.h"
#include "strata/torch/base/placement.h"

namespace strata::python {

using namespace py::literals;

std::shared_ptr<py::function> held(py::function function) {
  return {new py::function(std::move(function)), [](py::function* last) {
            const py::gil_scoped_acquire acquire;
            delete last;
          }};
}

void warn(const std::string& text) {
  const py::gil_scoped_acquire acquire;
  py::module_::import("logging").attr("getLogger")("strata").attr("warning")("%s", text);
}

engine::InitReport::Progress progress_from(const py::object& function) {
  if (function.is_none()) return {};
  const auto call = held(py::cast<py::function>(function));
  return [call](const std::string& phase, Bytes done, Bytes total) {
    const py::gil_scoped_acquire acquire;
    (*call)(phase, done.value, total.value);
  };
}

// {way, reason, cached, buffered_gb_per_s, direct_gb_per_s}, with None for unknown values; None if
// no files were read.
py::object reading_of(const engine::InitReport& report) {
  if (!report.reading) return py::none();
  const checkpoint::ReadChoice& choice = *report.reading;
  return py::dict("way"_a = choice.direct ? "direct" : "buffered", "reason"_a = choice.reason,
                  "cached"_a = choice.figures.cached,
                  "buffered_gb_per_s"_a = choice.figures.buffered_gb_per_s,
                  "direct_gb_per_s"_a = choice.figures.direct_gb_per_s);
}

// {tier, reason, reading, phases: [{name, seconds, bytes}], device_growth_bytes, pinned_bytes}
py::dict init_report(ShardedModel& model) {
  const engine::InitReport& report = model.engine().init_report();
  py::list phases;
  for (const engine::InitPhase& phase : report.phases())
    phases.append(py::dict("name"_a = phase.name, "seconds"_a = phase.seconds,
                           "bytes"_a = phase.bytes.value));
  // Host memory is pinned for a link only; without a link none is pinned.
  const Bytes staging = model.ledger().peak(memory::Tier::kHost, memory::Kind::kStaging);
  return py::dict("tier"_a = report.tier, "reason"_a = report.reason,
                  "reading"_a = reading_of(report), "phases"_a = phases,
                  "device_growth_bytes"_a = report.device_growth().value,
                  "pinned_bytes"_a = model.place().is_cpu() ? 0 : staging.value);
}

namespace {

// The bytes of each state that the engine keeps, by name, on a tier.
std::map<std::string_view, Bytes> states_on(ShardedModel& model, memory::Tier tier) {
  std::map<std::string_view, Bytes> bytes;
  const auto* native = dynamic_cast<engine::NativeOptimizer*>(model.engine().optimizer());
  for (const engine::Unit& unit : model.engine().weights().units()) {
    if (native == nullptr || !unit.trainable()) continue;
    const memory::Tier there =
        unit.spec.place.states.value_or(model.engine().options().states.tier);
    for (const std::string_view state : native->states().names(unit.id))
      bytes[state] += there == tier ? native->states().bytes_of_state(unit) : Bytes();
  }
  return bytes;
}

// {kind: {"device": bytes, "host": bytes, "nvme": bytes}}, and "total"; kinds as they lie in
// stores: the states of the engine's own optimizer have a line each, with its share of them.
py::dict kinds_of(ShardedModel& model, const forecast::MemoryForecast& foreseen) {
  using memory::Kind;
  const auto by_tier = [](const auto& bytes_on) {
    py::dict tiers;
    for (int t = 0; t < memory::kTierCount; ++t) {
      const auto tier = static_cast<memory::Tier>(t);
      tiers[py::str(std::string(name_of(tier)))] = bytes_on(tier).value;
    }
    return tiers;
  };
  py::dict kinds;
  for (const Kind kind :
       {Kind::kWeights, Kind::kGathered, Kind::kMasterWeights, Kind::kOptimizerState,
        Kind::kGradientShards, Kind::kGradients, Kind::kStaging}) {
    if (kind != Kind::kOptimizerState) {
      kinds[py::str(std::string(name_of(kind)))] =
          by_tier([&](memory::Tier tier) { return foreseen.on(tier, kind); });
      continue;
    }
    for (const auto& [state, any] : states_on(model, memory::Tier::kDevice)) {
      kinds[py::str(std::string(state))] = by_tier([&, name = state](memory::Tier tier) {
        Bytes all;
        const auto states = states_on(model, tier);
        for (const auto& [other, bytes] : states) all += bytes;
        const double share = all == Bytes() ? 0.0
                                            : static_cast<double>(states.at(name).value) /
                                                  static_cast<double>(all.value);
        return Bytes(static_cast<std::int64_t>(
            std::llround(static_cast<double>(foreseen.on(tier, kind).value) * share)));
      });
    }
  }
  kinds["total"] = by_tier([&](memory::Tier tier) { return foreseen.total_on(tier); });
  return kinds;
}

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
  return py::dict(
      "links"_a = links, "device_lane"_a = lanes(&engine::LaneTimes::device),
      "host_lane"_a = lanes(&engine::LaneTimes::host), "cached_bytes"_a = report.cached.value,
      "fetch_wait_seconds"_a = stores.seconds_waited, "copy_wait_seconds"_a = report.copy_wait,
      "parts"_a = stores.parts, "parts_ready"_a = stores.parts_ready, "drives"_a = drives);
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

// None if nothing is offloaded or could be; else {kinds: {kind: {tier: peak bytes}}, folders:
// {"weights": path, "states": path}, rules: [{rule, parameters, bytes}], budgets: None or
// {"device": bytes, "host": bytes}, on which the ranks agreed}
py::object placement(ShardedModel& model) {
  const engine::EngineOptions& options = model.engine().options();
  const engine::OffloadConfig& offload = model.config().offload;
  if (!options.states.offloads() && !options.weights.offloads() && !offload.automatic)
    return py::none();
  const forecast::MemoryForecast foreseen = without_lock([&] { return model.memory_forecast(); });
  py::dict folders;
  if (options.weights.uses(memory::Tier::kNvme))
    folders["weights"] = fmt::format("{}", fmt::join(options.weights.folders, ", "));
  if (options.states.uses(memory::Tier::kNvme))
    folders["states"] = fmt::format("{}", fmt::join(options.states.folders, ", "));
  py::list rules;
  for (const engine::RuleUse& use : engine::rule_uses(model.specs(), offload))
    rules.append(
        py::dict("rule"_a = use.rule, "parameters"_a = use.params, "bytes"_a = use.bytes.value));
  const py::dict budgets("device"_a = mapped(model.room().device, &Bytes::value),
                         "host"_a = mapped(model.room().host, &Bytes::value));
  return py::dict("kinds"_a = kinds_of(model, foreseen), "folders"_a = folders, "rules"_a = rules,
                  "budgets"_a = offload.automatic ? py::object(budgets) : py::none());
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
