// One rank of a job without memory, without other ranks, and without a model's code: the device,
// the collectives and the passes under an engine whose memory is forecast (memory_forecast.h).
//
// Threads: one thread at a time. Ownership: collectives share the device; a DryModel borrows the
// parameters. Errors: OutOfMemoryError if the system has no more address space.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/cpu_device.h"
#include "strata/engine/engine.h"
#include "strata/plan/block_search.h"
#include "strata/plan/unit_plan.h"

namespace strata::forecast {

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
  void scale(std::span<float>, std::span<const float>, float, device::Stream&) override {}
  void sum_in_order(std::span<float>, std::span<const std::byte* const>, DType, float, bool,
                    device::Stream&) override {}
  void store_remainder(const kernels::MasterRemainder&, Numel, const std::byte*, DType, Numel,
                       device::Stream&) override {}
  void join_masters(std::span<float>, const std::byte*, const kernels::MasterRemainder&, Numel,
                    device::Stream&) override {}
  void adopt_written(std::span<float>, const std::byte*, DType, device::Stream&) override {}
  void adam_step(const kernels::AdamSpans&, const kernels::AdamScalars&, device::Stream&) override {
  }
  std::vector<kernels::Fingerprint> fingerprints(std::span<const std::span<const std::byte>> runs,
                                                 Bytes piece, device::Stream&) override;
  std::vector<kernels::GradStats> grad_stats(std::span<const std::span<const float>> gradients,
                                             device::Stream&) override;
  void sums_of_squares(std::span<double>, std::span<const std::span<const float>>,
                       device::Stream&) override {}
  void gradient_factor(kernels::GradientFactor&, std::span<const double>, double, double,
                       device::Stream&) override {}
  void write_flag(device::Flag&, std::uint32_t, device::Stream&) override {}
  void wait_flag(const device::Flag&, std::uint32_t, device::Stream&) override {}

 private:
  bool runs_ahead_;
};

// Rank 0 of collectives with these traits, without the others. Operations move no bytes, and count
// as under way until the caller waits for them, so the engine on them holds as much as it ever may.
// Texts and small values come back as if every rank had sent the same.
std::unique_ptr<comm::Collectives> make_dry_collectives(const comm::Traits& traits,
                                                        std::shared_ptr<device::Device> device);

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
           const plan::ModuleTree& tree);

  // One forward and backward.
  void run(engine::Engine& engine, bool boundary, Arrival arrival) const;

 private:
  struct Scope {
    std::vector<int> units;
    std::vector<int> tiles;     // used one after the other, once all else of it is gathered
    std::vector<int> params;    // whose gradients its backward makes
    std::vector<int> children;  // scopes inside it, in their order
    bool read_in_backward = true;
  };
  void forward(engine::Engine& engine, int scope) const;
  void backward(engine::Engine& engine, int scope, Arrival arrival) const;
  void backward_through_tiles(engine::Engine& engine, const Scope& scope) const;
  void add_gradients(engine::Engine& engine, std::vector<int> params, Arrival arrival) const;

  std::span<const plan::ParamSpec> params_;
  std::vector<Scope> scopes_;
  std::vector<int> outermost_;
  std::vector<int> outside_;  // parameters that no scope owns
};

}  // namespace strata::forecast
