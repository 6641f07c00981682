#include "strata/forecast/memory_forecast.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>

#include "strata/base/error.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/comm/transports.h"
#include "strata/engine/checkpoint/training_saver.h"
#include "strata/engine/optimize/external_optimizer.h"
#include "strata/engine/step_control.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/forecast/dry_rank.h"
#include "strata/offload/make_store.h"

namespace strata::forecast {
namespace {

// The first pass learns the order, the second uses it, and the third begins with the second's
// state.
constexpr int kSteps = 3;

class NoViews final : public engine::ParameterViews {
 public:
  void attach(int, std::span<std::byte>) override {}
  void detach(int) override {}
  bool await(int) override { return true; }
};

std::size_t groups_of(std::span<const plan::ParamSpec> params) {
  int last = 0;
  for (const plan::ParamSpec& param : params) last = std::max(last, param.group);
  return static_cast<std::size_t>(last) + 1;
}

MemoryForecast peaks_of(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
                        const plan::ModuleTree& tree, const Training& training,
                        const comm::Traits& traits, Arrival arrival) {
  const auto device = std::make_shared<DryDevice>(training.runs_ahead);
  engine::EngineOptions options = training.options;
  options.trace.clear();
  NoViews views;
  const std::shared_ptr<comm::Collectives> collectives = make_dry_collectives(traits, device);
  engine::cap_staging(options, params, plan, training.rule, collectives->shard_position().count);
  const offload::MadeStores stores =
      offload::make_dry_stores(options.states, options.weights, *device);
  engine::Engine engine(params, plan, options, training.rule, "", collectives, device,
                        {stores.states, stores.weights}, views);
  engine.weights_changed(/*complete=*/true);
  engine.prepare();
  if (auto* external = dynamic_cast<engine::ExternalOptimizer*>(engine.optimizer()))
    external->set_update([](std::span<const std::span<float>>) {});
  const DryModel model(params, plan, tree);
  std::unique_ptr<device::HostMemory> copy;  // stays from one save to the next
  if (const Bytes bytes = engine::copied_bytes(engine); training.saves_beside && bytes > Bytes())
    copy = device->allocate_host(bytes, memory::Kind::kStaging);
  const std::vector<engine::GroupScalars> groups(groups_of(params));
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < training.micro_steps; ++micro)
      model.run(engine, micro + 1 == training.micro_steps, arrival);
    if (engine.optimizer() != nullptr) engine.step(groups, 1.0, /*skip_on_overflow=*/false);
  }
  // A checkpoint is loaded, or saved at once, beside all of that.
  const std::unique_ptr<device::HostMemory> ring =
      device->allocate_host(checkpoint::TransferRing::room({}), memory::Kind::kStaging);
  MemoryForecast forecast;
  const memory::Ledger& ledger = *device->ledger();
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    forecast.by_kind[static_cast<std::size_t>(k)] = ledger.peak(memory::Tier::kDevice, kind);
    forecast.host_by_kind[static_cast<std::size_t>(k)] = ledger.peak(memory::Tier::kHost, kind);
    forecast.nvme_by_kind[static_cast<std::size_t>(k)] = ledger.peak(memory::Tier::kNvme, kind);
  }
  forecast.total = ledger.peak(memory::Tier::kDevice);
  forecast.host = ledger.peak(memory::Tier::kHost);
  forecast.nvme = ledger.peak(memory::Tier::kNvme);
  return forecast;
}

// fp32 if there are no parameters.
DType most_common_dtype(std::span<const plan::ParamSpec> params) {
  std::map<DType, Numel> elements;
  for (const plan::ParamSpec& param : params) elements[param.dtype] += param.numel();
  const auto most =
      std::ranges::max_element(elements, {}, [](const auto& entry) { return entry.second; });
  return most == elements.end() ? DType::kFloat32 : most->first;
}

void add_tier(offload::StatePlacement& place, std::optional<memory::Tier> tier) {
  if (tier && !place.uses(*tier)) place.others.push_back(*tier);
}

}  // namespace

MemoryForecast forecast_memory(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
                               const plan::ModuleTree& tree, const Training& training,
                               const comm::Traits& traits) {
  MemoryForecast most;
  for (const Arrival arrival :
       {Arrival{true, false}, Arrival{true, true}, Arrival{false, false}, Arrival{false, true}}) {
    const MemoryForecast one = peaks_of(params, plan, tree, training, traits, arrival);
    for (std::size_t k = 0; k < one.by_kind.size(); ++k) {
      most.by_kind[k] = std::max(most.by_kind[k], one.by_kind[k]);
      most.host_by_kind[k] = std::max(most.host_by_kind[k], one.host_by_kind[k]);
      most.nvme_by_kind[k] = std::max(most.nvme_by_kind[k], one.nvme_by_kind[k]);
    }
    most.total = std::max(most.total, one.total);
    most.host = std::max(most.host, one.host);
    most.nvme = std::max(most.nvme, one.nvme);
  }
  return most;
}

std::string kinds_on(const MemoryForecast& forecast, memory::Tier tier) {
  std::string text;
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    const Bytes bytes = forecast.on(tier, kind);
    if (bytes.value > 0)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name_of(kind), to_string(bytes));
  }
  return text.empty() ? "nothing" : text;
}

int ranks_of_a_host(const Job& job) {
  return job.ranks_per_host == 0 ? job.world_size : std::min(job.ranks_per_host, job.world_size);
}

comm::Traits traits_of_job(const engine::Config& config, const Job& job) {
  if (job.world_size < 1 || job.ranks_per_host < 0) {
    throw UsageError(fmt::format("a job has at least one rank, and one a host; found {} and {}",
                                 job.world_size, job.ranks_per_host));
  }
  const int host = job.ranks_per_host == 0 ? job.world_size : job.ranks_per_host;
  const bool one_host = job.world_size <= host;
  const int size = config.shard_group_size(job.world_size);
  const int groups = job.world_size / size;
  const comm::TransportSettings settings = config.strata.transports;
  comm::Traits inside =
      traits_of(choose_inside(settings, {size, one_host || host % size == 0}, job.on_gpus), size,
                job.on_gpus);
  if (settings.joint_gathers && size > 1) inside.one_sided = false;
  if (groups == 1) return inside;
  const comm::Traits across =
      traits_of(choose_across(settings, {groups, one_host}, job.on_gpus), groups, job.on_gpus);
  return grouped_traits(inside, across, config.slices());
}

engine::EngineOptions engine_options_of(std::span<const plan::ParamSpec> params,
                                        const engine::Config& config) {
  engine::EngineOptions options = engine::engine_options_from(config, most_common_dtype(params));
  if (!config.offload.automatic) return options;
  for (const plan::ParamSpec& param : params) {
    add_tier(options.weights, param.place.weights);
    add_tier(options.states, param.place.states);
  }
  return options;
}

Trainers trainers_of(const engine::Config& config, engine::UpdateRule rule, const Job& job) {
  return {rule, traits_of_job(config, job), job.on_gpus};
}

MemoryForecast forecast_training(std::span<const plan::ParamSpec> params,
                                 const plan::ModelPlan& plan, const plan::ModuleTree& tree,
                                 const engine::Config& config, const Trainers& trainers) {
  Training training;
  training.options = engine_options_of(params, config);
  training.rule = trainers.rule;
  training.micro_steps = static_cast<int>(config.batch.accumulation_steps.value_or(1));
  training.runs_ahead = trainers.runs_ahead;
  training.saves_beside = config.async_checkpoints;
  return forecast_memory(params, plan, tree, training, trainers.traits);
}

}  // namespace strata::forecast
