#include "strata/forecast/dry_rank.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"

namespace strata::forecast {
namespace {

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

class DryCollectives final : public comm::Collectives {
 public:
  DryCollectives(const comm::Traits& traits, std::shared_ptr<device::Device> device)
      : Collectives(0, traits),
        device_(std::move(device)),
        contributions_(device_->create_stream()) {}

  std::string_view name() const override { return "dry"; }
  device::Stream* contribution_stream() override {
    return traits().has_contribution_stream ? contributions_.get() : nullptr;
  }

  std::unique_ptr<comm::Inbox> make_inbox(std::string, Bytes bytes) override {
    if (!traits().has_inbox) return nullptr;
    return std::make_unique<DryInbox>(bytes);
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

constexpr int kNone = -1;

}  // namespace

std::vector<kernels::Fingerprint> DryDevice::fingerprints(
    std::span<const std::span<const std::byte>> runs, Bytes piece, device::Stream&) {
  std::size_t pieces = 0;
  for (const auto run : runs) pieces += (run.size() + piece.size() - 1) / piece.size();
  return std::vector<kernels::Fingerprint>(pieces);
}

std::vector<kernels::GradStats> DryDevice::grad_stats(
    std::span<const std::span<const float>> gradients, device::Stream&) {
  return std::vector<kernels::GradStats>(gradients.size());
}

std::unique_ptr<comm::Collectives> make_dry_collectives(const comm::Traits& traits,
                                                        std::shared_ptr<device::Device> device) {
  return std::make_unique<DryCollectives>(traits, std::move(device));
}

DryModel::DryModel(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
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

void DryModel::run(engine::Engine& engine, bool boundary, Arrival arrival) const {
  engine.begin_forward();
  for (const int scope : outermost_) forward(engine, scope);
  engine.begin_backward(boundary);
  for (std::size_t i = outermost_.size(); i-- > 0;) backward(engine, outermost_[i], arrival);
  add_gradients(engine, outside_, arrival);
  engine.end_backward();
  engine.end_micro_step();
}

void DryModel::forward(engine::Engine& engine, int scope) const {
  const Scope& s = scopes_[static_cast<std::size_t>(scope)];
  for (const int unit : s.units) engine.gatherer().acquire(unit);
  for (const int child : s.children) forward(engine, child);
  for (const int tile : s.tiles) {
    engine.gatherer().acquire(tile);
    engine.gatherer().release(tile);
  }
  for (const int unit : s.units) engine.gatherer().release(unit);
}

void DryModel::backward(engine::Engine& engine, int scope, Arrival arrival) const {
  const Scope& s = scopes_[static_cast<std::size_t>(scope)];
  const auto& all = engine.weights().units();
  const bool holds = s.read_in_backward && std::ranges::any_of(s.units, [&](int unit) {
                       return !all[static_cast<std::size_t>(unit)].whole;
                     });
  if (holds) {
    for (const int unit : s.units) engine.gatherer().acquire(unit);
  }
  backward_through_tiles(engine, s);
  for (std::size_t i = s.children.size(); i-- > 0;) backward(engine, s.children[i], arrival);
  add_gradients(engine, s.params, arrival);
  if (holds) {
    for (const int unit : s.units) engine.gatherer().release(unit);
  }
}

void DryModel::backward_through_tiles(engine::Engine& engine, const Scope& scope) const {
  for (std::size_t i = scope.tiles.size(); i-- > 0;) {
    const engine::Unit& unit = engine.weights().units()[static_cast<std::size_t>(scope.tiles[i])];
    if (scope.read_in_backward) engine.gatherer().acquire(unit.id);
    if (unit.trainable()) add_gradients(engine, unit.spec.params, {});
    if (scope.read_in_backward) engine.gatherer().release(unit.id);
  }
}

void DryModel::add_gradients(engine::Engine& engine, std::vector<int> params,
                             Arrival arrival) const {
  if (arrival.reversed) std::ranges::reverse(params);
  if (arrival.together) {
    std::set<int> begun;  // units
    const auto second = [&](int param) {
      return !begun.insert(engine.weights().unit_of(param).id).second;
    };
    std::stable_partition(params.begin(), params.end(), second);
  }
  for (const int param : params)
    engine.add_gradient(param, nullptr, params_[static_cast<std::size_t>(param)].gradient_dtype());
}

}  // namespace strata::forecast
