// A model without a framework: drives an Engine as a front end does, scope by scope, with values
// and gradients that are functions of their place, so that a reference can make them too. Threads:
// one FakeRank belongs to one thread; run_ranks() makes a thread a rank.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/core/fake_compute.h"
#include "kernels/references.h"
#include "plan/model_builder.h"
#include "strata/base/error.h"
#include "strata/comm/collectives.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/device/cpu_device.h"
#include "strata/engine/engine.h"
#include "strata/kernels/elementwise.h"
#include "strata/offload/make_store.h"

namespace strata::engine::fake {

using Values = std::vector<float>;

// Exact in every floating dtype that weights may have: multiples of 1/64 in [-1, 1).
inline float noise(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = (seed + 1) * 0x9E3779B97F4A7C15U + index * 0xD1B54A32D192ED03U;
  x ^= x >> 31;
  x *= 0xBF58476D1CE4E5B9U;
  x ^= x >> 29;
  return static_cast<float>(static_cast<std::int64_t>(x % 128) - 64) / 64.0F;
}

inline Values noises(std::uint64_t seed, Numel numel) {
  Values values(numel.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = noise(seed, i);
  return values;
}

// For a dtype that is not floating-point: bytes of the same size that differ from each other.
inline std::vector<std::byte> rounded(const Values& values, DType dtype) {
  const Numel numel(values.size());
  std::vector<std::byte> bytes(bytes_of(numel, dtype).size());
  if (!is_floating(dtype)) {
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::byte>(static_cast<int>(128.0F * noise(7, i)));
    return bytes;
  }
  kernels::cast_reference(bytes.data(), dtype, reinterpret_cast<const std::byte*>(values.data()),
                          DType::kFloat32, numel);
  return bytes;
}

struct FakeModel {
  std::vector<plan::ParamSpec> params;
  plan::ModuleTree tree;
  plan::ModelPlan plan;

  FakeModel(const plan::ModelBuilder& builder, const plan::PlanOptions& options = {})
      : params(builder.params), tree(builder.tree) {
    plan = plan::plan_units(params, tree, options);
  }
  Values initial(int param) const {
    return noises(1000U + static_cast<std::uint64_t>(param), numel(param));
  }
  Numel numel(int param) const { return params[static_cast<std::size_t>(param)].numel(); }
  int count() const { return static_cast<int>(params.size()); }
};

// Three layers with parameters of 0, 1, 17 and more elements, a frozen one each, groups that
// alternate, an embedding that the head is tied to.
inline plan::ModelBuilder small_builder(DType dtype) {
  plan::ModelBuilder b;
  const int embed = b.linear(0, "embed", 300, dtype);
  const int layers = b.list(0, "layers");
  for (const char* name : {"0", "1", "2"}) {
    const int layer = b.module(layers, name, "Layer");
    const int inner = b.module(layer, "inner", "Inner");
    for (const std::int64_t numel : {257, 0, 1, 17, 640}) {
      const int p = b.param(inner, "w" + std::to_string(numel), numel, dtype);
      b.params[static_cast<std::size_t>(p)].group = p % 3;
    }
    b.param(layer, "frozen", 33, dtype, false);
  }
  b.linear(0, "norm", 5, dtype);
  b.tie(b.module(0, "head", "Linear"), b.tree[static_cast<std::size_t>(embed)].params[0]);
  return b;
}

// The same with parameters of several dtypes side by side; the frozen ones are quantized.
inline plan::ModelBuilder mixed_builder() {
  plan::ModelBuilder b = small_builder(DType::kFloat32);
  constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kFloat16};
  for (std::size_t p = 0; p < b.params.size(); ++p)
    b.params[p].dtype = b.params[p].trainable ? kDTypes[p % 4] : DType::kUInt8;
  return b;
}

// Records where units are; a unit is attached at most once at a time.
class Views final : public ParameterViews {
 public:
  Views(std::size_t units, bool can_await)
      : can_await_(can_await), flat_(units), attached_(units), pending_(units) {}
  void attach(int unit, std::span<std::byte> flat) override {
    EXPECT_FALSE(attached(unit)) << "unit " << unit;
    pending_[static_cast<std::size_t>(unit)] = false;
    attached_[static_cast<std::size_t>(unit)] = true;
    flat_[static_cast<std::size_t>(unit)] = flat;
  }
  void detach(int unit) override {
    EXPECT_TRUE(attached(unit) || awaited(unit)) << "unit " << unit;
    attached_[static_cast<std::size_t>(unit)] = false;
  }
  bool await(int unit) override {
    EXPECT_TRUE(attached(unit)) << "unit " << unit;
    if (!can_await_) return false;
    attached_[static_cast<std::size_t>(unit)] = false;
    pending_[static_cast<std::size_t>(unit)] = true;
    return true;
  }
  bool awaited(int unit) const { return pending_[static_cast<std::size_t>(unit)] != 0; }
  bool attached(int unit) const { return attached_[static_cast<std::size_t>(unit)] != 0; }
  std::span<std::byte> flat(int unit) const { return flat_[static_cast<std::size_t>(unit)]; }

 private:
  bool can_await_;
  std::vector<std::span<std::byte>> flat_;
  // Not vector<bool>: other threads read other units.
  std::vector<char> attached_;
  std::vector<char> pending_;
};

struct RankOptions {
  EngineOptions engine;
  UpdateRule rule = UpdateRule::kAdamW;
  std::string settings;
  bool can_await = false;  // the parameters' readers
  // The optimizer's states are made before weights have values, as where these come from files.
  bool prepares_first = false;
  // Gradients stay until they were read; else they are read before add_gradient() returns.
  bool keeps_gradients = true;
  std::shared_ptr<device::CpuDevice> device = nullptr;         // null: one of its own
  std::function<bool(const plan::ScopeSpec&)> runs = nullptr;  // its passes' scopes; null: all
  // Makes the stores of offloaded blocks; null: the engine's options decide.
  std::function<Stores(device::Device&)> stores = nullptr;
};

// One rank: a model, an engine, and the device and collectives that they use.
class FakeRank {
 public:
  FakeRank(const FakeModel& model, const RankOptions& options,
           std::shared_ptr<comm::Collectives> collectives)
      : model_(model),
        keeps_gradients_(options.keeps_gradients),
        runs_(options.runs),
        collectives_(std::move(collectives)),
        device_(options.device ? options.device : std::make_shared<device::CpuDevice>()),
        compute_(device_),
        views_(model.plan.units.size(), options.can_await),
        engine_(std::make_unique<Engine>(
            model.params, model.plan, options.engine, options.rule, options.settings, collectives_,
            device_, options.stores ? options.stores(*device_) : stores_of(options.engine),
            views_)) {
    if (options.prepares_first) engine_->prepare();
    for (int p = 0; p < model.count(); ++p) {
      const Values values = model.initial(p);
      const DType dtype = model.params[static_cast<std::size_t>(p)].dtype;
      const DType brought = is_floating(dtype) ? DType::kFloat32 : dtype;
      const std::vector<std::byte> bytes = rounded(values, brought);
      engine_->weights().store(p, Numel(), model.numel(p), bytes.data(), brought);
    }
    engine_->weights_changed();
  }

  // Ranks leave together: one that ends earlier would be missed by gathers of the others.
  ~FakeRank() {
    if (std::uncaught_exceptions() > 0) return;
    try {
      gatherer().complete_all();
      collectives_->barrier();
    } catch (const CommError& error) {
      ADD_FAILURE() << "the ranks did not end together: " << error.what();
    }
    engine_.reset();
    compute_.settle();
    EXPECT_EQ(wrong_units_.load(), 0) << "scopes saw other weights than those of the step before";
  }
  FakeRank(const FakeRank&) = delete;
  FakeRank& operator=(const FakeRank&) = delete;

  Engine& engine() { return *engine_; }
  Gatherer& gatherer() { return engine_->gatherer(); }
  comm::Collectives& collectives() { return *collectives_; }
  const FakeModel& model() const { return model_; }
  const memory::Ledger& ledger() const { return *device_->ledger(); }
  Views& views() { return views_; }

  // Sets the parameters' values that scopes are to see from now on.
  void expect_weights(std::vector<std::vector<std::byte>> weights) {
    expected_.push_back(std::move(weights));
  }

  bool runs(const plan::ScopeSpec& scope) const { return runs_ == nullptr || runs_(scope); }
  // Runs `inside` while the scope's units are gathered.
  void in_scope(
      const plan::ScopeSpec& scope, const std::function<void()>& inside = [] {}) {
    for (const int unit : scope.units) gatherer().acquire(unit);
    for (const int unit : scope.units) EXPECT_TRUE(views_.attached(unit));
    for (const int unit : scope.units) look_at(unit);
    inside();
    for (const int unit : scope.units) gatherer().release(unit);
  }
  // The coming step's, for updates in the backward pass.
  std::vector<GroupScalars> groups;
  void begin_backward(bool boundary, bool synchronise = true) {
    engine_->begin_backward(boundary, synchronise, groups);
  }
  void forward() {
    engine_->begin_forward();
    for (const plan::ScopeSpec& scope : model_.plan.scopes) {
      if (runs(scope)) in_scope(scope);
    }
  }
  void add(int param, const Values& gradient) {
    const DType dtype = model_.params[static_cast<std::size_t>(param)].gradient_dtype();
    std::vector<std::byte> values = rounded(gradient, dtype);
    auto memory = compute_.memory(Bytes(values.size()));
    std::byte* const there = memory.get();
    compute_.run([there, values] { std::ranges::copy(values, there); });
    engine_->add_gradient(param, there, dtype, keeps_gradients_ ? std::move(memory) : nullptr);
  }
  // add() of a tile, which the model computes where the engine says.
  void write(int param, const Values& gradient) {
    const int unit = engine_->weights().unit_of(param).id;
    const GradientTarget place = engine_->reducer().begin_add(unit, 0);
    ASSERT_EQ(place.dtype, DType::kFloat32);
    compute_.run([gradient, place] {
      auto* const values = reinterpret_cast<float*>(place.values);
      for (std::size_t i = 0; i < gradient.size(); ++i)
        values[i] = place.holds ? values[i] + gradient[i] : gradient[i];
    });
    engine_->reducer().end_add(unit, 0);
  }
  // Scopes in reverse; `gradients` are those of one scope's own parameters, in reverse too.
  void backward(bool boundary, const std::function<void(int param)>& gradient,
                bool synchronise = true) {
    begin_backward(boundary, synchronise);
    std::vector<bool> given(model_.params.size());
    const auto& scopes = model_.plan.scopes;
    for (std::size_t s = scopes.size(); s-- > 0;) {
      if (!runs(scopes[s])) continue;
      in_scope(scopes[s], [&] {
        for (int p = model_.count(); p-- > 0;) {
          const auto index = static_cast<std::size_t>(p);
          const int unit = model_.plan.unit_of_param[index];
          const auto has = [unit](const plan::ScopeSpec& scope) {
            return std::ranges::find(scope.units, unit) != scope.units.end();
          };
          // As autograd's, where it matters: after the last use.
          const bool early =
              engine_->options().update_in_backward &&
              std::any_of(scopes.begin(), scopes.begin() + static_cast<long>(s),
                          [&](const auto& scope) { return runs(scope) && has(scope); });
          if (given[index] || early || !has(scopes[s]) || !model_.params[index].trainable) continue;
          given[index] = true;
          gradient(p);
        }
      });
    }
    engine_->end_backward();
  }
  // The bytes of a parameter, gathered.
  std::vector<std::byte> weight(int param) {
    const Unit& unit = engine_->weights().unit_of(param);
    const plan::Slot& slot = engine_->weights().slot_of(param);
    const DType dtype = unit.layout.dtype();
    gatherer().acquire(unit.id);
    const auto bytes = views_.flat(unit.id).subspan(bytes_of(slot.offset, dtype).size(),
                                                    bytes_of(slot.numel, dtype).size());
    std::vector<std::byte> result;
    compute_.run([&] { result.assign(bytes.begin(), bytes.end()); });
    compute_.settle();
    gatherer().release(unit.id);
    return result;
  }
  // After it the host may read memory of the device.
  void settle() { compute_.settle(); }

 private:
  Stores stores_of(const EngineOptions& options) {
    const int rank = collectives_->rank();
    offload::MadeStores made =
        offload::make_stores(options.states, options.weights, *device_, rank);
    return {std::move(made.states), std::move(made.weights)};
  }

  void look_at(int unit) {
    if (expected_.empty()) return;
    const plan::FlatLayout& layout =
        engine_->weights().units()[static_cast<std::size_t>(unit)].layout;
    compute_.run([this, slots = layout.slots(), dtype = layout.dtype(), &weights = expected_.back(),
                  flat = views_.flat(unit)] {
      for (const plan::Slot& slot : slots) {
        const auto& wanted = weights[static_cast<std::size_t>(slot.param)];
        const std::byte* const found = flat.data() + bytes_of(slot.offset, dtype).size();
        if (wanted.empty() || std::memcmp(found, wanted.data(), wanted.size()) == 0) continue;
        wrong_units_.fetch_add(1, std::memory_order_relaxed);
      }
    });
  }

  const FakeModel& model_;
  bool keeps_gradients_;
  std::function<bool(const plan::ScopeSpec&)> runs_;
  std::shared_ptr<comm::Collectives> collectives_;
  std::shared_ptr<device::CpuDevice> device_;
  FakeCompute compute_;
  std::deque<std::vector<std::vector<std::byte>>> expected_;  // kept: kernels may be late
  std::atomic<int> wrong_units_ = 0;
  Views views_;
  std::unique_ptr<Engine> engine_;
};

using Body = std::function<void(int rank, std::shared_ptr<comm::Collectives>)>;

// Runs a body on ranks that are threads. Returns the message of each rank's error, or "".
inline std::vector<std::string> run_ranks(int world, const Body& body) {
  comm::CommOptions options;
  options.timeout = std::chrono::seconds(60);
  comm::LocalGroup group(world, options);
  std::vector<std::string> errors(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r, group.rank(r));
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (std::size_t r = 0; r < errors.size(); ++r) EXPECT_EQ(errors[r], "") << "rank " << r;
}

}  // namespace strata::engine::fake
