// Start-up as Python shows it: the engine's report of its phases, the progress, and the link's
// speed.
#include "strata/engine/record/init_report.h"

#include <fmt/ranges.h>

#include "bindings.h"
#include "strata/base/error.h"
#include "strata/engine/record/links.h"
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

// {kind: {"device": bytes, "host": bytes, "nvme": bytes}}, and "total"; kinds as they lie in
// stores: the two moments, which have the same size, have a line each.
py::dict kinds_of(const forecast::MemoryForecast& foreseen) {
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
    const int parts = kind == Kind::kOptimizerState ? 2 : 1;
    const py::dict entry =
        by_tier([&](memory::Tier tier) { return foreseen.on(tier, kind) / parts; });
    kinds[py::str(parts == 2 ? "exp_avg" : std::string(name_of(kind)))] = entry;
    if (parts == 2) kinds["exp_avg_sq"] = entry;
  }
  kinds["total"] = by_tier([&](memory::Tier tier) { return foreseen.total_on(tier); });
  return kinds;
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
  return py::dict("kinds"_a = kinds_of(foreseen), "folders"_a = folders, "rules"_a = rules,
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

}  // namespace strata::python
