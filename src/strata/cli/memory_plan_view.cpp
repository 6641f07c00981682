// A memory plan as people and programs read it.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "strata/cli/memory_plan.h"
#include "strata/cli/text_table.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

bool is_planned(memory::Kind kind) {
  return kind != memory::Kind::kWorkspace;  // memory of kernels is not planned
}

std::string cell(const StagePlan& stage, Bytes bytes) {
  return stage.forecast ? to_string(bytes) : "-";
}

std::string answer_of(std::optional<bool> fits) {
  return !fits ? "-" : *fits ? "yes" : "no";
}

template <typename Of>
void add_row(TextTable& table, const MemoryPlan& plan, std::string label, const Of& of) {
  std::vector<std::string> row{std::move(label)};
  for (const StagePlan& stage : plan.stages) row.push_back(cell(stage, of(stage)));
  table.add(std::move(row));
}

template <typename Fits>
void add_answers(TextTable& table, std::string label, const Fits& fits) {
  std::vector<std::string> row{std::move(label)};
  for (int stage = 0; stage < 4; ++stage) row.push_back(answer_of(fits(stage)));
  table.add(std::move(row));
}

void add_device(TextTable& table, const MemoryPlan& plan) {
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (!is_planned(kind)) continue;
    add_row(table, plan, std::string(name_of(kind)), [&](const StagePlan& stage) {
      return stage.forecast ? stage.forecast->of(kind) : Bytes();
    });
  }
  table.add_line();
  add_row(table, plan, "at most, together",
          [](const StagePlan& stage) { return stage.forecast ? stage.forecast->total : Bytes(); });
  if (!plan.request.device_memory) return;
  add_answers(table, fmt::format("fits {}", to_string(*plan.request.device_memory)),
              [&](int stage) { return plan.fits(stage); });
}

// A row for each kind of which the host or the drive holds any bytes, at any stage.
void add_tier(TextTable& table, const MemoryPlan& plan, memory::Tier tier, const char* name,
              const std::optional<Bytes>& room) {
  const auto holds = [&](const auto& of) {
    return std::ranges::any_of(plan.stages,
                               [&](const StagePlan& stage) { return of(stage) > Bytes(); });
  };
  const auto total = [&](const StagePlan& stage) { return stage.total_on(tier); };
  if (!room && !holds(total)) return;
  table.add_line();
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    const auto held = [&](const StagePlan& stage) { return stage.held_on(tier, kind); };
    if (holds(held)) add_row(table, plan, fmt::format("{}: {}", name, name_of(kind)), held);
  }
  add_row(table, plan, fmt::format("{}, together", name), total);
  if (!room) return;
  add_answers(table, fmt::format("fits {} {}", name, to_string(*room)),
              [&](int stage) { return plan.fits_on(tier, stage); });
}

TextTable table_of(const MemoryPlan& plan) {
  TextTable table({"each device holds", "stage 0", "stage 1", "stage 2", "stage 3"});
  add_device(table, plan);
  add_tier(table, plan, memory::Tier::kHost, "host", plan.request.host_memory);
  add_tier(table, plan, memory::Tier::kNvme, "NVMe", plan.request.nvme_space);
  return table;
}

// Advice on host and drive, which the ranks of a host share.
std::string shared_advice(const MemoryPlan& plan, memory::Tier tier, const char* what) {
  if (plan.fits_on(tier, plan.stage) != false) return "";
  return fmt::format("{} DOES NOT: {} of {} each are more than its {}\n", what,
                     count_of(static_cast<std::size_t>(plan.ranks_of_host), "rank"),
                     to_string(plan.own().total_on(tier)),
                     to_string(*plan.room_on(tier) * plan.ranks_of_host));
}

std::string advice_of(const MemoryPlan& plan) {
  const std::string shared = shared_advice(plan, memory::Tier::kHost, "the host") +
                             shared_advice(plan, memory::Tier::kNvme, "the drive");
  const std::optional<bool> own = plan.fits(plan.stage);
  if (!plan.request.device_memory && plan.own().lacking.empty()) return shared;
  if (own == true) return fmt::format("stage {} of the configuration fits\n", plan.stage) + shared;
  std::string text = fmt::format("stage {} of the configuration {}\n", plan.stage,
                                 own ? "DOES NOT FIT" : "is refused") +
                     shared;
  for (const bool all : {true, false}) {
    for (int stage = 0; stage < 4; ++stage) {
      if (plan.fits(stage) == true && (!all || plan.fits_all(stage)))
        return text + fmt::format("write \"stage\": {}, which does{}\n", stage,
                                  all ? "" : " on the device");
    }
  }
  if (!plan.request.device_memory) return text;
  return text +
         (plan.fits_from
              ? fmt::format("no stage does on {}; stage 3 does from {} ranks\n",
                            count_of(static_cast<std::size_t>(plan.request.job.world_size), "rank"),
                            *plan.fits_from)
              : "no stage does, nor on more ranks\n");
}

Json tier_of(const StagePlan& stage, memory::Tier tier) {
  Json json = {{"total", stage.total_on(tier).value}};
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    const Bytes bytes = stage.held_on(tier, kind);
    if (bytes.value > 0) json[std::string(name_of(kind))] = bytes.value;
  }
  return json;
}

template <typename Value>
Json value_or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json();
}

Json bytes_or_null(const std::optional<Bytes>& bytes) {
  return bytes ? Json(bytes->value) : Json();
}

Json stage_of(const MemoryPlan& plan, int index) {
  const StagePlan& stage = plan.stages[static_cast<std::size_t>(index)];
  Json entry = {{"stage", index}};
  entry["fits"] = value_or_null(plan.fits(index));
  entry["refused"] = stage.refused.empty() ? Json() : Json(stage.refused);
  entry["lacking"] = stage.lacking.empty() ? Json() : Json(stage.lacking);
  entry["host_fits"] = value_or_null(plan.fits_on(memory::Tier::kHost, index));
  entry["nvme_fits"] = value_or_null(plan.fits_on(memory::Tier::kNvme, index));
  if (!stage.forecast) return entry;
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (is_planned(kind))
      entry["device"][std::string(name_of(kind))] = stage.forecast->of(kind).value;
  }
  entry["device"]["total"] = stage.forecast->total.value;
  entry["host"] = tier_of(stage, memory::Tier::kHost);
  entry["nvme"] = tier_of(stage, memory::Tier::kNvme);
  return entry;
}

}  // namespace

std::string text_of(const MemoryPlan& plan) {
  std::string text = fmt::format(
      "{}: {} of {} elements, {} of weights\n{} at stage {} of the configuration, {}\n\n",
      plan.request.model, count_of(plan.tensors, "parameter"), with_commas(plan.elements.value),
      to_string(plan.weights),
      count_of(static_cast<std::size_t>(plan.request.job.world_size), "rank"), plan.stage,
      plan.request.job.on_gpus ? "on GPUs" : "on CPUs");
  text += table_of(plan).text() + advice_of(plan) + "\n";
  for (std::size_t stage = 0; stage < plan.stages.size(); ++stage) {
    const StagePlan& entry = plan.stages[stage];
    if (!entry.refused.empty())
      text += fmt::format("stage {} is refused: {}\n", stage, entry.refused);
    if (!entry.lacking.empty()) text += fmt::format("stage {}: {}\n", stage, entry.lacking);
  }
  text +=
      "Not counted: activations, gradients before they reach the engine, and what torch, the "
      "driver "
      "and\nthe collectives keep for themselves. Kinds are peaks of their own, and do not add up.\n"
      "Host and NVMe are of each rank, also while it loads or saves.\n";
  for (const std::string& remark : plan.remarks) text += "- " + remark + "\n";
  return text;
}

Json json_of(const MemoryPlan& plan) {
  Json json = {{"model", plan.request.model},
               {"world_size", plan.request.job.world_size},
               {"parameters", plan.tensors},
               {"elements", plan.elements.value},
               {"weight_bytes", plan.weights.value},
               {"stage", plan.stage},
               {"stages", Json::array()},
               {"ranks_of_host", plan.ranks_of_host},
               {"host", tier_of(plan.own(), memory::Tier::kHost)},
               {"nvme", tier_of(plan.own(), memory::Tier::kNvme)},
               {"remarks", plan.remarks}};
  json["device_memory"] = bytes_or_null(plan.request.device_memory);
  json["host_memory"] = bytes_or_null(plan.request.host_memory);
  json["nvme_space"] = bytes_or_null(plan.request.nvme_space);
  json["host_fits"] = value_or_null(plan.fits_on(memory::Tier::kHost, plan.stage));
  json["nvme_fits"] = value_or_null(plan.fits_on(memory::Tier::kNvme, plan.stage));
  json["fits_from"] = value_or_null(plan.fits_from);
  for (int stage = 0; stage < 4; ++stage) json["stages"].push_back(stage_of(plan, stage));
  return json;
}

}  // namespace strata::cli
