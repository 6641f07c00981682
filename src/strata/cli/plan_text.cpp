#include <fmt/core.h>

#include <algorithm>

#include "strata/cli/commands.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

std::string ranks_text(int ranks) {
  return count_of(static_cast<std::size_t>(ranks), "rank");
}

Bytes bytes_in(const Json& json, const char* key) {
  return Bytes(json.value(key, std::int64_t{0}));
}

Bytes activations_in(const Json& row, const char* key) {
  return row.contains("activations") ? bytes_in(row["activations"], key) : Bytes();
}

// The part of a peak by its key in JSON.
std::string name_of_part(const Json& longest, const std::string& key) {
  const auto piece = longest["mlp_piece"].get<std::int64_t>();
  if (key == "engine") return "the engine";
  if (key == "host") return "inputs of checkpoints, on the host of each rank";
  if (key == "kept")
    return longest["checkpointing"] == true ? "inputs of checkpoints" : "values that layers keep";
  if (key == "loss") return longest["fused"] == true ? "loss without logits" : "loss from logits";
  if (key == "attention") return "one layer's attention and norms";
  return piece == 0 ? "one layer's MLP"
                    : fmt::format("one layer's MLP, {} tokens at a time", with_commas(piece));
}

std::string tokens_of(const Json& longest) {
  return longest["seq"] == 0 ? "none" : with_commas(longest["seq"]) + " tokens";
}

std::string text_of_longest(const Json& longest) {
  if (longest.is_null()) return "";
  std::string text = fmt::format(
      "the longest sequence at stage {}{}: {}\nfirst to run out: memory of the {}, for {}; held "
      "then\n",
      longest["stage"].dump(),
      longest.contains("placement") ? ", " + longest["placement"].get<std::string>() : "",
      tokens_of(longest), longest["first"] == "host" ? "host" : "device",
      longest["first"] == "host" ? "inputs of checkpoints"
                                 : name_of_part(longest, longest["first"]));
  for (const std::string key : {"engine", "kept", "loss", "mlp", "attention", "host"}) {
    const bool at_peak =
        longest["peak"] == "loss" ? key != "mlp" && key != "attention" : key != "loss";
    if (const Bytes bytes = bytes_in(longest, key.c_str()); at_peak && bytes > Bytes())
      text += fmt::format("{:>10}  {}\n", to_string(bytes), name_of_part(longest, key));
  }
  const Json& advice = longest["advice"];
  if (advice.is_null()) return text;
  text +=
      fmt::format("longer with {}: {}", advice["setting"].get<std::string>(), tokens_of(advice));
  if (const Bytes bytes = bytes_in(advice, "host"); bytes > Bytes())
    text += fmt::format(", {} of each rank on the host", to_string(bytes));
  return text + "\n";
}

std::string table_of(const PlanRequest& request, const Json& stages) {
  TextTable table({"each device holds", "stage 0", "stage 1", "stage 2", "stage 3"});
  const auto add_row = [&](std::string label, const auto& cell) {
    std::vector<std::string> row{std::move(label)};
    for (const Json& stage : stages) row.push_back(cell(stage));
    table.add(std::move(row));
  };
  const auto bytes = [](const Json& stage, const char* tier, const std::string& kind) {
    return stage.contains(tier) ? Bytes(stage[tier].value(kind, std::int64_t{0})) : Bytes();
  };
  const auto add_sizes = [&](std::string label, const char* tier, const std::string& kind) {
    add_row(std::move(label), [&](const Json& stage) {
      return stage.contains(tier) ? to_string(bytes(stage, tier, kind)) : "-";
    });
  };
  const auto add_answers = [&](std::string label, const char* key) {
    add_row(std::move(label), [&](const Json& stage) {
      return stage[key].is_null() ? "-" : stage[key].get<bool>() ? "yes" : "no";
    });
  };
  const auto hosts_inputs = [](const Json& stage) {
    return activations_in(stage, "host") > Bytes();
  };
  for_each_kind([&](memory::Kind kind, const std::string& name) {
    if (is_planned(kind)) add_sizes(name, "device", name);
  });
  table.add_line();
  add_sizes("at most, together", "device", "total");
  if (request.seq > 0)
    add_row("activations, about",
            [&](const Json& stage) { return to_string(activations_in(stage, "bytes")); });
  if (request.device_memory)
    add_answers(fmt::format("fits {}", to_string(*request.device_memory)), "fits");
  if (std::any_of(stages.begin(), stages.end(),
                  [](const Json& stage) { return stage.contains("longest"); }))
    add_row("longest sequence", [](const Json& stage) {
      return stage.contains("longest") ? tokens_of(stage["longest"]) : "-";
    });
  for (const SharedTier& tier : kSharedTiers) {
    const auto holds = [&](const std::string& kind) {
      return std::any_of(stages.begin(), stages.end(),
                         [&](const Json& stage) { return bytes(stage, tier.key, kind) > Bytes(); });
    };
    const std::optional<Bytes>& room = request.*tier.room;
    if (!room && !holds("total")) continue;
    table.add_line();
    for_each_kind([&](memory::Kind, const std::string& name) {
      if (holds(name)) add_sizes(fmt::format("{}: {}", tier.label, name), tier.key, name);
    });
    add_sizes(fmt::format("{}, together", tier.label), tier.key, "total");
    if (tier.tier == memory::Tier::kHost && std::any_of(stages.begin(), stages.end(), hosts_inputs))
      add_row("and inputs of checkpoints",
              [&](const Json& stage) { return to_string(activations_in(stage, "host")); });
    if (room) add_answers(fmt::format("fits {} {}", tier.label, to_string(*room)), tier.fits_key);
  }
  return table.text();
}

std::string advice_of(const PlanRequest& request, const Json& plan) {
  const Json& stages = plan["stages"];
  const auto stage = plan["stage"].get<std::size_t>();
  const Json& own = stages[stage];
  std::string shared;
  for (const SharedTier& tier : kSharedTiers) {
    if (own[tier.fits_key] != false) continue;
    const auto ranks = plan["ranks_of_host"].get<int>();
    shared +=
        fmt::format("{} DOES NOT: {} of {} each are more than its {}\n", tier.noun,
                    ranks_text(ranks), to_string(Bytes(own[tier.key]["total"].get<std::int64_t>())),
                    to_string(*(request.*tier.room) / ranks * ranks));
  }
  if (!request.device_memory && own["lacking"].is_null()) return shared;
  if (own["fits"] == true)
    return fmt::format("stage {} of the configuration fits\n", stage) + shared;
  std::string text = fmt::format("stage {} of the configuration {}\n", stage,
                                 own["fits"].is_null() ? "is refused" : "DOES NOT FIT") +
                     shared;
  for (const bool all : {true, false}) {
    for (const Json& other : stages) {
      if (other["fits"] == true && (!all || fits_all(other)))
        return text + fmt::format("write \"stage\": {}, which does{}\n", other["stage"].get<int>(),
                                  all ? "" : " on the device");
    }
  }
  if (!request.device_memory) return text;
  if (plan["fits_from"].is_null()) return text + "no stage does, nor on more ranks\n";
  return text + fmt::format("no stage does on {}; stage 3 does from {} ranks\n",
                            ranks_text(request.job.world_size), plan["fits_from"].get<int>());
}

std::string grid_of(const PlanRequest& request, const Json& plan) {
  const auto ranks = plan["ranks_of_host"].get<int>();
  const auto size = [](const Json& row, const char* tier, int times, Bytes more = Bytes()) {
    if (!row.contains(tier)) return std::string("-");
    return to_string(Bytes(row[tier]["total"].get<std::int64_t>()) * times + more);
  };
  std::vector<std::string> head{"stage",     "placement", "each device",
                                "each host", "its drive", "fits"};
  const bool asks_longest = !plan["longest"].is_null();
  if (asks_longest) head.push_back("longest sequence");
  TextTable table(head);
  table.align_left(1);
  for (const Json& row : plan["grid"]) {
    std::string lacking;
    for (const auto& [key, what] :
         {std::pair("fits", "device"), {"host_fits", "host"}, {"nvme_fits", "drive"}}) {
      if (row[key] == false) lacking += fmt::format("{}{}", lacking.empty() ? "no: " : ", ", what);
    }
    if (lacking.empty()) lacking = row["fits"].is_null() ? "-" : "yes";
    std::vector<std::string> cells{row["stage"].dump(),
                                   row["placement"].get<std::string>(),
                                   size(row, "device", 1, activations_in(row, "bytes")),
                                   size(row, "host", ranks, activations_in(row, "host") * ranks),
                                   size(row, "nvme", ranks),
                                   lacking};
    if (asks_longest) cells.push_back(row.contains("longest") ? tokens_of(row["longest"]) : "-");
    table.add(cells);
  }
  if (!request.device_memory) return table.text();
  if (plan["best"].is_null()) return table.text() + "nothing fits all memory that was named\n";
  const Json& best = plan["grid"][plan["best"].get<std::size_t>()];
  return table.text() + fmt::format("the fastest that fits: stage {}, {}{}\n", best["stage"].dump(),
                                    best["placement"].get<std::string>(),
                                    request.write.empty() ? "" : "; written: " + request.write);
}

}  // namespace

std::string text_of_plan(const PlanRequest& request, const Json& plan) {
  std::string text = fmt::format(
      "{}: {} of {} elements ({} trained), {} of weights\n{}{}, {}\n\n", request.model,
      count_of(plan["parameters"], "parameter"), with_commas(plan["elements"]),
      plan["trained_elements"] == plan["elements"] ? "all" : with_commas(plan["trained_elements"]),
      to_string(Bytes(plan["weight_bytes"].get<std::int64_t>())),
      ranks_text(request.job.world_size),
      request.grid ? "" : fmt::format(" at stage {} of the configuration", plan["stage"].dump()),
      request.job.on_gpus ? "on GPUs" : "on CPUs");
  const Json& stages = plan[request.grid ? "grid" : "stages"];
  text +=
      request.grid ? grid_of(request, plan) : table_of(request, stages) + advice_of(request, plan);
  text += text_of_longest(plan["longest"]);
  if (const Json most = plan.value("longest_row", Json());
      !most.is_null() && most != plan["best"]) {
    const Json& row = stages[most.get<std::size_t>()];
    text += fmt::format("the longest of all: stage {}, {}: {}\n", row["stage"].dump(),
                        row["placement"].get<std::string>(), tokens_of(row["longest"]));
  }
  text += "\n";
  for (const Json& stage : stages) {
    for (const auto& [key, verb] : {std::pair("refused", " is refused"), {"lacking", ""}}) {
      if (!stage[key].is_null())
        text += fmt::format("stage {}{}: {}\n", stage["stage"].get<int>(), verb,
                            stage[key].get<std::string>());
    }
  }
  text += fmt::format(
      "Not counted: {}gradients before they reach the engine (all of a compiled block), and what\n"
      "torch, the driver and the collectives keep for themselves. Kinds are peaks of their own, "
      "and do not add up.\nHost and "
      "NVMe are {}, also while it loads or saves.\n",
      plan["activations"].is_null() && plan["longest"].is_null() ? "activations, " : "",
      request.grid ? "of all ranks of a host" : "of each rank");
  for (const Json& remark : plan["remarks"]) text += "- " + remark.get<std::string>() + "\n";
  if (request.shapes) text += plan["shapes"].dump(1) + "\n";
  return text;
}

}  // namespace strata::cli
