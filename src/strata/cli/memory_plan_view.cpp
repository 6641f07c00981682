// A memory plan as people and programs read it.
#include <fmt/format.h>

#include "strata/cli/memory_plan.h"
#include "strata/cli/text_table.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

bool is_planned(memory::Kind kind) {
  return kind != memory::Kind::kWorkspace;  // what kernels keep for themselves nobody plans
}

std::string cell(const StagePlan& stage, Bytes bytes) {
  return stage.forecast ? to_string(bytes) : "-";
}

std::string answer_of(std::optional<bool> fits) {
  return !fits ? "-" : *fits ? "yes" : "no";
}

void add_answers(TextTable& table, const MemoryPlan& plan) {
  if (plan.request.device_memory) {
    std::vector<std::string> fits{fmt::format("fits {}", to_string(*plan.request.device_memory))};
    for (int stage = 0; stage < 4; ++stage) fits.push_back(answer_of(plan.fits(stage)));
    table.add(std::move(fits));
  }
  if (plan.request.host_memory) {
    table.add({fmt::format("fits host {}", to_string(*plan.request.host_memory)), "", "", "", "",
               answer_of(plan.fits_on(memory::Tier::kHost))});
  }
  if (plan.request.nvme_space) {
    table.add({fmt::format("fits NVMe {}", to_string(*plan.request.nvme_space)), "", "", "", "", "",
               answer_of(plan.fits_on(memory::Tier::kNvme))});
  }
}

TextTable table_of(const MemoryPlan& plan) {
  TextTable table(
      {"each device holds", "stage 0", "stage 1", "stage 2", "stage 3", "host", "NVMe"});
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (!is_planned(kind)) continue;
    std::vector<std::string> row{std::string(name_of(kind))};
    for (const StagePlan& stage : plan.stages)
      row.push_back(cell(stage, stage.forecast ? stage.forecast->of(kind) : Bytes()));
    for (const memory::Tier tier : {memory::Tier::kHost, memory::Tier::kNvme})
      row.push_back(cell(plan.own(), plan.held_on(tier, kind)));
    table.add(std::move(row));
  }
  table.add_line();
  std::vector<std::string> total{"at most, together"};
  for (const StagePlan& stage : plan.stages)
    total.push_back(cell(stage, stage.forecast ? stage.forecast->total : Bytes()));
  for (const memory::Tier tier : {memory::Tier::kHost, memory::Tier::kNvme})
    total.push_back(cell(plan.own(), plan.total_on(tier)));
  table.add(std::move(total));
  add_answers(table, plan);
  return table;
}

// Of host and drive, which the ranks of a host share.
std::string shared_advice(const MemoryPlan& plan, memory::Tier tier, const char* what) {
  if (plan.fits_on(tier) != false) return "";
  return fmt::format("{} DOES NOT: {} of {} each are more than its {}\n", what,
                     count_of(static_cast<std::size_t>(plan.ranks_of_host), "rank"),
                     to_string(plan.total_on(tier)),
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
  for (int stage = 0; stage < 4; ++stage) {
    if (plan.fits(stage) == true)
      return text + fmt::format("write \"stage\": {}, which does\n", stage);
  }
  if (!plan.request.device_memory) return text;
  return text +
         (plan.fits_from
              ? fmt::format("no stage does on {}; stage 3 does from {} ranks\n",
                            count_of(static_cast<std::size_t>(plan.request.job.world_size), "rank"),
                            *plan.fits_from)
              : "no stage does, nor on more ranks\n");
}

// Of one tier at the configuration's stage.
Json tier_of(const MemoryPlan& plan, memory::Tier tier) {
  Json json = {{"total", plan.total_on(tier).value}};
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    const Bytes bytes = plan.held_on(tier, kind);
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
  if (!stage.forecast) return entry;
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (is_planned(kind))
      entry["device"][std::string(name_of(kind))] = stage.forecast->of(kind).value;
  }
  entry["device"]["total"] = stage.forecast->total.value;
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
      "Host and NVMe are of each rank at the configuration's stage, also while it loads or "
      "saves.\n";
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
               {"host", tier_of(plan, memory::Tier::kHost)},
               {"nvme", tier_of(plan, memory::Tier::kNvme)},
               {"remarks", plan.remarks}};
  json["device_memory"] = bytes_or_null(plan.request.device_memory);
  json["host_memory"] = bytes_or_null(plan.request.host_memory);
  json["nvme_space"] = bytes_or_null(plan.request.nvme_space);
  json["host_fits"] = value_or_null(plan.fits_on(memory::Tier::kHost));
  json["nvme_fits"] = value_or_null(plan.fits_on(memory::Tier::kNvme));
  json["fits_from"] = value_or_null(plan.fits_from);
  for (int stage = 0; stage < 4; ++stage) json["stages"].push_back(stage_of(plan, stage));
  return json;
}

}  // namespace strata::cli
