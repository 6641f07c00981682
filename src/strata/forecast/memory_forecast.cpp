#include "strata/forecast/memory_forecast.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/comm/collectives.h"
#include "strata/comm/transports.h"
#include "strata/device/cpu_device.h"
#include "strata/engine/checkpoint/training_saver.h"
#include "strata/engine/optimize/external_optimizer.h"
#include "strata/engine/step_control.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/memory/host_buffer.h"
#include "strata/offload/make_store.h"

namespace strata::forecast {
namespace {

// The first pass learns the order, the second uses it, and the third begins with the second's
// state.
constexpr int kSteps = 3;

// Computes nothing: memory is address space without pages, kernels and copies return at once, and
// the ledger counts as on any other device. Every read of a value finds zero.
class DryDevice final : public device::CpuDevice {
 public:
  // `runs_ahead`: as the device does that this one stands for.
  explicit DryDevice(bool runs_ahead) : runs_ahead_(runs_ahead) {}

  std::string_view name() const override { return "dry"; }
  bool runs_ahead() const override { return runs_ahead_; }

  void copy(std::span<std::byte>, std::span<const std::byte>, device::Stream&) override {}
  void fill_zero(std::span<std::byte>, device::Stream&) override {}
  void cast(std::byte*, DType, const std::byte*, DType, Numel, device::Stream&) override {}
  void accumulate(std::byte*, DType, const std::byte*, DType, Numel, device::Stream&) override {}
  void sum_in_order(std::span<float>, std::span<const std::byte* const>, DType, float, bool,
                    device::Stream&) override {}
  void store_remainder(const kernels::MasterRemainder&, Numel, const std::byte*, DType, Numel,
                       device::Stream&) override {}
  void join_masters(std::span<float>, const std::byte*, const kernels::MasterRemainder&, Numel,
                    device::Stream&) override {}
  void adopt_written(std::span<float>, const std::byte*, DType, device::Stream&) override {}
  void update_step(const kernels::UpdateSpans&, const kernels::UpdateScalars&,
                   device::Stream&) override {}
  void update_on_host(const kernels::UpdateSpans&, const kernels::UpdateScalars&,
                      ThreadPool&) override {}
  std::vector<kernels::Fingerprint> fingerprints(std::span<const std::span<const std::byte>> runs,
                                                 Bytes piece, device::Stream&) override {
    std::size_t pieces = 0;
    for (const auto run : runs) pieces += (run.size() + piece.size() - 1) / piece.size();
    return std::vector<kernels::Fingerprint>(pieces);
  }
  void sums_of_squares(std::span<double>, std::span<const std::span<const float>>,
                       device::Stream&) override {}
  void gradient_factor(kernels::GradientFactor&, std::span<const double>, double, double,
                       device::Stream&) override {}
  void wait_flag(const device::Flag&, std::uint32_t, device::Stream&) override {}

 private:
  bool runs_ahead_;
};

// Addresses that are never accessed.
class DryBuffer final : public comm::SharedBuffer {
 public:
  DryBuffer(std::string name, Bytes bytes) : SharedBuffer(std::move(name)), memory_(bytes) {}
  std::span<std::byte> local() override { return memory_.bytes(); }

 private:
  memory::HostBuffer memory_;
};

class DryWork final : public comm::Work {
 public:
  bool done() override { return over_; }
  void wait() override { over_ = true; }

 private:
  bool over_ = false;
};

class DryInbox final : public comm::Inbox {
 public:
  explicit DryInbox(Bytes bytes) : ring_(bytes) {}
  void expect(std::span<const Bytes> contributions) override { ring_.expect(contributions); }
  bool writable(std::size_t index) const override { return ring_.after(index).has_value(); }
  void write(std::size_t, Numel, std::span<const std::byte>, DType) override {}
  void write_zero(std::size_t, Numel, Numel, DType) override {}
  std::unique_ptr<comm::Work> reduce(std::size_t index, const comm::Reduction&,
                                     std::string_view) override {
    ring_.begun(index, ++begun_);
    return std::make_unique<DryWork>();
  }

 private:
  comm::InboxRing ring_;
  std::uint32_t begun_ = 0;
};

// Rank 0 of collectives with these traits, without the others. Operations move no bytes, and count
// as under way until the caller waits for them, so the engine on them holds as much as it ever may.
// Texts and small values come back as if every rank had sent the same.
class DryCollectives final : public comm::Collectives {
 public:
  DryCollectives(const comm::Traits& traits, std::shared_ptr<device::Device> device)
      : Collectives(0, traits),
        device_(std::move(device)),
        contributions_(device_->create_stream()) {}

  std::string_view name() const override { return "dry"; }
  device::Stream* stream(comm::Traffic) override {
    return traits().has_contribution_stream ? contributions_.get() : nullptr;
  }

  std::unique_ptr<comm::Inbox> make_inbox(std::string, Bytes bytes) override {
    return traits().has_inbox ? std::make_unique<DryInbox>(bytes) : nullptr;
  }

  std::unique_ptr<comm::SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return std::make_unique<DryBuffer>(std::move(name), bytes);
  }
  std::unique_ptr<comm::Work> all_gather(const comm::SliceMap&, std::span<std::byte>,
                                         std::string_view) override {
    return std::make_unique<DryWork>();
  }
  std::unique_ptr<comm::Work> reduce_scatter(const comm::Reduction&, std::string_view) override {
    return std::make_unique<DryWork>();
  }
  std::unique_ptr<comm::Work> exchange(const comm::Exchange&, std::string_view) override {
    return std::make_unique<DryWork>();
  }
  void all_reduce(std::span<double>, comm::ReduceOp) override {}
  void all_gather_on_device(std::span<std::byte>, std::span<const std::byte>) override {}
  void broadcast(std::span<std::byte>, int) override {}
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return std::vector<std::string>(static_cast<std::size_t>(world_size()), text);
  }
  void barrier() override {}
  void require_usable() override {}
  void end(comm::Ending, std::string_view) noexcept override {}

 private:
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> contributions_;
};

// The order in which gradients come within a scope. A plan does not know it: a block's first layer
// norm may be registered last.
struct Arrival {
  bool reversed = true;   // against the order of the parameters, as autograd's is on the whole
  bool together = false;  // every unit waits for one that comes when all others are there
};

// A model's passes for an engine, made from its plan and its modules alone: scopes are nested as
// their modules are, forward and backward, and every trainable parameter gets a gradient when the
// scope of its first owner runs backward.
class DryModel {
 public:
  DryModel(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
           const plan::ModuleTree& tree)
      : params_(params) {
    std::map<int, int> scope_of_module;
    for (std::size_t s = 0; s < plan.scopes.size(); ++s)
      scope_of_module.emplace(plan.scopes[s].module, static_cast<int>(s));
    const auto scope_around = [&](int module) {
      for (; module >= 0; module = tree[static_cast<std::size_t>(module)].parent) {
        const auto found = scope_of_module.find(module);
        if (found != scope_of_module.end()) return found->second;
      }
      return kNone;
    };
    for (const plan::ScopeSpec& spec : plan.scopes) {
      const plan::ModuleNode& module = tree[static_cast<std::size_t>(spec.module)];
      const int parent = scope_around(module.parent);
      const int index = static_cast<int>(scopes_.size());
      scopes_.push_back(
          {spec.units, spec.tiles, {}, {}, module.read_in_backward || !module.callable});
      STRATA_ASSERT(parent < index);  // scopes are in the order of modules, parents first
      (parent == kNone ? outermost_ : scopes_[static_cast<std::size_t>(parent)].children)
          .push_back(index);
    }
    std::vector<bool> placed(params.size());
    for (std::size_t m = 0; m < tree.size(); ++m) {
      const int scope = scope_around(static_cast<int>(m));
      for (const int param : tree[m].params) {
        const auto p = static_cast<std::size_t>(param);
        if (placed[p] || !params[p].trainable || params[p].tile) continue;
        placed[p] = true;
        (scope == kNone ? outside_ : scopes_[static_cast<std::size_t>(scope)].params)
            .push_back(param);
      }
    }
  }

  // One forward and backward.
  void run(engine::Engine& engine, bool boundary, Arrival arrival) const {
    engine.begin_forward();
    for (const int scope : outermost_) forward(engine, scope);
    engine.begin_backward(boundary);
    for (std::size_t i = outermost_.size(); i-- > 0;) backward(engine, outermost_[i], arrival);
    add_gradients(engine, outside_, arrival);
    engine.end_backward();
    engine.end_micro_step();
  }

 private:
  static constexpr int kNone = -1;
  struct Scope {
    std::vector<int> units;
    std::vector<int> tiles;     // used one after the other, once all else of it is gathered
    std::vector<int> params;    // whose gradients its backward makes
    std::vector<int> children;  // scopes inside it, in their order
    bool read_in_backward = true;
  };

  void forward(engine::Engine& engine, int scope) const {
    const Scope& s = scopes_[static_cast<std::size_t>(scope)];
    for (const int unit : s.units) engine.gatherer().acquire(unit);
    for (const int child : s.children) forward(engine, child);
    for (const int tile : s.tiles) {
      engine.gatherer().acquire(tile);
      engine.gatherer().release(tile);
    }
    for (const int unit : s.units) engine.gatherer().release(unit);
  }

  void backward(engine::Engine& engine, int scope, Arrival arrival) const {
    const Scope& s = scopes_[static_cast<std::size_t>(scope)];
    const auto& all = engine.weights().units();
    const bool holds = s.read_in_backward && std::ranges::any_of(s.units, [&](int unit) {
                         return !all[static_cast<std::size_t>(unit)].whole;
                       });
    if (holds) {
      for (const int unit : s.units) engine.gatherer().acquire(unit);
    }
    for (std::size_t i = s.tiles.size(); i-- > 0;) {
      const engine::Unit& tile = all[static_cast<std::size_t>(s.tiles[i])];
      if (s.read_in_backward) engine.gatherer().acquire(tile.id);
      if (tile.trainable()) add_gradients(engine, tile.spec.params, {});
      if (s.read_in_backward) engine.gatherer().release(tile.id);
    }
    for (std::size_t i = s.children.size(); i-- > 0;) backward(engine, s.children[i], arrival);
    add_gradients(engine, s.params, arrival);
    if (holds) {
      for (const int unit : s.units) engine.gatherer().release(unit);
    }
  }

  void add_gradients(engine::Engine& engine, std::vector<int> params, Arrival arrival) const {
    if (arrival.reversed) std::ranges::reverse(params);
    if (arrival.together) {
      std::set<int> begun;  // units
      const auto second = [&](int param) {
        return !begun.insert(engine.weights().unit_of(param).id).second;
      };
      std::stable_partition(params.begin(), params.end(), second);
    }
    for (const int param : params)
      engine.add_gradient(param, nullptr,
                          params_[static_cast<std::size_t>(param)].gradient_dtype());
  }

  std::span<const plan::ParamSpec> params_;
  std::vector<Scope> scopes_;
  std::vector<int> outermost_;
  std::vector<int> outside_;  // parameters that no scope owns
};

class NoViews final : public engine::ParameterViews {
 public:
  void attach(int, std::span<std::byte>) override {}
  void detach(int) override {}
  bool await(int) override { return true; }
};

MemoryForecast forecast_for(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
                            const plan::ModuleTree& tree, const Training& training,
                            Arrival arrival) {
  const auto device = std::make_shared<DryDevice>(training.runs_ahead);
  engine::EngineOptions options = training.options;
  options.trace.clear();
  NoViews views;
  const auto collectives = std::make_shared<DryCollectives>(training.traits, device);
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
  int last_group = 0;
  for (const plan::ParamSpec& param : params) last_group = std::max(last_group, param.group);
  const std::vector<engine::GroupScalars> groups(static_cast<std::size_t>(last_group) + 1);
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < training.micro_steps; ++micro)
      model.run(engine, micro + 1 == training.micro_steps, arrival);
    if (engine.optimizer() != nullptr) engine.step(groups, 1.0, /*skip_on_overflow=*/false);
  }
  // A checkpoint is loaded, or saved at once, beside all of that.
  const std::unique_ptr<device::HostMemory> ring =
      device->allocate_host(checkpoint::TransferRing::room({}), memory::Kind::kStaging);
  return peaks_of(*device->ledger());
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

MemoryForecast peaks_of(const memory::Ledger& ledger) {
  MemoryForecast peaks;
  for (int t = 0; t < memory::kTierCount; ++t) {
    const auto tier = static_cast<memory::Tier>(t);
    MemoryForecast::OfTier& of_tier = peaks.tiers[static_cast<std::size_t>(t)];
    for (int k = 0; k < memory::kKindCount; ++k)
      of_tier.by_kind[static_cast<std::size_t>(k)] =
          ledger.peak(tier, static_cast<memory::Kind>(k));
    of_tier.total = ledger.peak(tier);
  }
  return peaks;
}

MemoryForecast forecast_memory(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
                               const plan::ModuleTree& tree, const Training& training) {
  MemoryForecast most;
  for (const Arrival arrival :
       {Arrival{true, false}, Arrival{true, true}, Arrival{false, false}, Arrival{false, true}}) {
    const MemoryForecast one = forecast_for(params, plan, tree, training, arrival);
    for (std::size_t t = 0; t < most.tiers.size(); ++t) {
      MemoryForecast::OfTier& tier = most.tiers[t];
      std::ranges::transform(tier.by_kind, one.tiers[t].by_kind, tier.by_kind.begin(),
                             [](Bytes a, Bytes b) { return std::max(a, b); });
      tier.total = std::max(tier.total, one.tiers[t].total);
    }
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
  if (job.world_size < 1 || job.ranks_per_host < 0)
    throw UsageError("a job has at least one rank, and one a host; found {} and {}", job.world_size,
                     job.ranks_per_host);
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
  return forecast_memory(
      params, plan, tree,
      {trainers, engine_options_of(params, config),
       static_cast<int>(config.batch.accumulation_steps.value_or(1)), config.async_checkpoints});
}

}  // namespace strata::forecast
