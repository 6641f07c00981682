// Start-up as Python shows it: the engine's report of its phases, the progress, and the link's
// speed.
#include "strata/engine/record/init_report.h"

#include <fmt/ranges.h>

#include "bindings.h"
#include "strata/base/error.h"
#include "strata/engine/record/links.h"
#include "strata/torch/base/placement.h"

namespace strata::python {

using torch::ShardedModel;

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
  if (!report.reading()) return py::none();
  const checkpoint::ReadChoice& choice = *report.reading();
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
  // Host memory is pinned for a link only; without a link none is pinned.
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

namespace {

// {"device": bytes, "host": bytes, "nvme": bytes}
py::dict by_tier(Bytes device, Bytes host, Bytes nvme) {
  py::dict entry;
  entry["device"] = device.value;
  entry["host"] = host.value;
  entry["nvme"] = nvme.value;
  return entry;
}

// Kinds as they lie in stores: the two moments, which have the same size, have a line each.
py::dict kinds_of(const forecast::MemoryForecast& foreseen) {
  using memory::Kind;
  using memory::Tier;
  py::dict kinds;
  for (const Kind kind :
       {Kind::kWeights, Kind::kGathered, Kind::kMasterWeights, Kind::kOptimizerState,
        Kind::kGradientShards, Kind::kGradients, Kind::kStaging}) {
    const auto part = [&](Tier tier) {
      return kind == Kind::kOptimizerState ? foreseen.on(tier, kind) / 2 : foreseen.on(tier, kind);
    };
    const py::dict entry = by_tier(part(Tier::kDevice), part(Tier::kHost), part(Tier::kNvme));
    if (kind == Kind::kOptimizerState) {
      kinds["exp_avg"] = entry;
      kinds["exp_avg_sq"] = entry;
    } else {
      kinds[py::str(std::string(name_of(kind)))] = entry;
    }
  }
  kinds["total"] = by_tier(foreseen.total, foreseen.host, foreseen.nvme);
  return kinds;
}

py::object bytes_or_none(std::optional<Bytes> bytes) {
  return bytes ? py::object(py::int_(bytes->value)) : py::none();
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
  forecast::MemoryForecast foreseen;
  {
    const py::gil_scoped_release release;
    foreseen = model.memory_forecast();
  }
  py::dict folders;
  if (options.weights.uses(memory::Tier::kNvme))
    folders["weights"] = fmt::format("{}", fmt::join(options.weights.folders, ", "));
  if (options.states.uses(memory::Tier::kNvme))
    folders["states"] = fmt::format("{}", fmt::join(options.states.folders, ", "));
  py::list rules;
  for (const engine::RuleUse& use : engine::rule_uses(model.specs(), offload)) {
    py::dict entry;
    entry["rule"] = use.rule;
    entry["parameters"] = use.params;
    entry["bytes"] = use.bytes.value;
    rules.append(entry);
  }
  py::dict budgets;
  budgets["device"] = bytes_or_none(model.room().device);
  budgets["host"] = bytes_or_none(model.room().host);
  py::dict result;
  result["kinds"] = kinds_of(foreseen);
  result["folders"] = folders;
  result["rules"] = rules;
  result["budgets"] = offload.automatic ? py::object(budgets) : py::none();
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
