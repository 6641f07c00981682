// The whole training step, plainly: every rank's gradients whole, summed in the order of ranks (of
// each shard group, then, at the step, of the groups), accumulated in fp32, one Adam over whole
// parameters with the reference kernels. The engine's results, computed in shards, must have the
// same bits. Not for several threads.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "engine/core/fake_model.h"
#include "kernels/references.h"
#include "strata/kernels/grad_stats.h"
#include "strata/kernels/update.h"

namespace strata::engine::fake {

// One rank's gradients by parameter; nullopt: none.
using Gradients = std::vector<std::optional<Values>>;

struct ReferenceOptions {
  DType reduce_dtype = DType::kFloat32;
  bool sum = false;
  double clipping = 0.0;
  bool decoupled = true;
  int group_size = 0;           // ranks of a shard group; 0: all
  bool groups_at_once = false;  // added up after every micro-step
  bool decay_unused = false;    // updates parameters without a gradient, too
};

class ReferenceStep {
 public:
  ReferenceStep(const FakeModel& model, int world, const ReferenceOptions& options)
      : model_(model),
        world_(world),
        shards_(options.group_size > 0 ? options.group_size : world),
        options_(options),
        of_group_(static_cast<std::size_t>(world / shards_),
                  std::vector<Values>(model.params.size())) {
    for (int p = 0; p < model.count(); ++p) {
      const DType dtype = spec(p).dtype;
      masters_.push_back(model.initial(p));
      weights_.push_back(rounded(masters_.back(), dtype));
      exp_avg_.emplace_back(masters_.back().size());
      exp_avg_sq_.emplace_back(masters_.back().size());
      accumulated_.emplace_back();
    }
    steps_.resize(masters_.size());
    forget();
  }

  // One micro-step. Not reduced: its gradients are kept by each rank, in the reduce dtype.
  void add(const std::vector<Gradients>& by_rank, bool reduce) {
    for (std::size_t r = 0; r < by_rank.size(); ++r) {
      for (std::size_t p = 0; p < by_rank[r].size(); ++p) {
        if (by_rank[r][p]) came_[p] = true;
        if (by_rank[r][p]) keep(kept_[r][p], *by_rank[r][p], spec(p).gradient_dtype());
      }
    }
    if (reduce) reduce_kept();
  }

  // Returns the norm; updates unless it is not finite.
  double step(std::span<const GroupScalars> groups, double loss_scale) {
    add_up_groups();
    const double norm = gradient_norm() / loss_scale;
    if (std::isfinite(norm)) {
      double scale = 1.0 / loss_scale;
      if (options_.clipping > 0.0) scale *= std::min(1.0, options_.clipping / (norm + 1e-6));
      for (std::size_t p = 0; p < masters_.size(); ++p) {
        if (!spec(p).trainable || !(came_[p] || options_.decay_unused)) continue;
        ++steps_[p];
        update(p, groups, static_cast<float>(scale));
      }
    }
    forget_accumulated();
    return norm;
  }

  // Drops the gradients added since the last step.
  void forget() {
    forget_accumulated();
    forget_kept();
  }

  const std::vector<std::byte>& weight(int param) const {
    return weights_[static_cast<std::size_t>(param)];
  }
  const std::vector<std::vector<std::byte>>& weights() const { return weights_; }

 private:
  const plan::ParamSpec& spec(std::size_t p) const { return model_.params[p]; }
  const plan::ParamSpec& spec(int p) const { return spec(static_cast<std::size_t>(p)); }

  void forget_kept() {
    kept_.assign(static_cast<std::size_t>(world_),
                 std::vector<std::vector<std::byte>>(masters_.size()));
  }

  void forget_accumulated() {
    came_.assign(masters_.size(), false);
    for (Values& values : accumulated_) values.clear();
    for (auto& group : of_group_) {
      for (Values& values : group) values.clear();
    }
  }

  void keep(std::vector<std::byte>& kept, const Values& gradient, DType dtype) const {
    const std::vector<std::byte> source = rounded(gradient, dtype);
    const Numel numel(gradient.size());
    if (kept.empty()) {
      kept.resize(bytes_of(numel, options_.reduce_dtype).size());
      kernels::cast_reference(kept.data(), options_.reduce_dtype, source.data(), dtype, numel);
    } else {
      kernels::accumulate_reference(kept.data(), options_.reduce_dtype, source.data(), dtype,
                                    numel);
    }
  }

  void reduce_kept() {
    const float scale = options_.sum ? 1.0F : 1.0F / static_cast<float>(world_);
    for (std::size_t p = 0; p < masters_.size(); ++p) {
      if (!spec(p).trainable) continue;
      for (std::size_t group = 0; group < of_group_.size(); ++group) {
        std::vector<const std::byte*> sources;
        for (int i = 0; i < shards_; ++i) {
          auto& kept =
              kept_[group * static_cast<std::size_t>(shards_) + static_cast<std::size_t>(i)];
          kept[p].resize(
              bytes_of(spec(p).numel(), options_.reduce_dtype).size());  // zeroes if none
          sources.push_back(kept[p].data());
        }
        Values& sum = of_group_[group][p];
        const bool filled = !sum.empty();
        sum.resize(masters_[p].size());
        kernels::sum_in_order_reference(sum, sources, options_.reduce_dtype, scale, filled);
      }
    }
    forget_kept();
    if (options_.groups_at_once) add_up_groups_at_once();
  }

  void add_up_groups_at_once() {
    for (std::size_t p = 0; p < masters_.size(); ++p) {
      if (!spec(p).trainable) continue;
      accumulated_[p].resize(masters_[p].size());
      for (std::size_t i = 0; i < accumulated_[p].size(); ++i) {
        float sum = of_group_.front()[p][i];
        for (std::size_t group = 1; group < of_group_.size(); ++group)
          sum += of_group_[group][p][i];
        accumulated_[p][i] += sum;
      }
      for (auto& group : of_group_) group[p].clear();
    }
  }

  void add_up_groups() {
    if (options_.groups_at_once) return;
    for (std::size_t p = 0; p < masters_.size(); ++p) {
      if (!spec(p).trainable) continue;
      accumulated_[p] = of_group_.front()[p];
      for (std::size_t group = 1; group < of_group_.size(); ++group) {
        for (std::size_t i = 0; i < accumulated_[p].size(); ++i)
          accumulated_[p][i] += of_group_[group][p][i];
      }
    }
  }

  // Sums over each rank's shards, then over ranks, as the shards lie.
  double gradient_norm() const {
    double total = 0.0;
    bool finite = true;
    for (int rank = 0; rank < shards_; ++rank) {
      double sum = 0.0;
      for (const plan::UnitSpec& unit : model_.plan.units) {
        if (!unit.trainable) continue;
        const plan::FlatLayout layout(model_.params, unit.params, unit.dtype, shards_);
        Values flat(layout.padded().size());
        for (const plan::Slot& slot : layout.slots()) {
          const Values& values = accumulated_[static_cast<std::size_t>(slot.param)];
          std::copy(values.begin(), values.end(),
                    flat.begin() + static_cast<std::ptrdiff_t>(slot.offset.size()));
        }
        const auto shard = std::span<const float>(flat).subspan((layout.shard() * rank).size(),
                                                                layout.shard().size());
        const double squares = kernels::sum_of_squares_reference(shard);
        sum += squares;
        finite = finite && std::isfinite(squares);
      }
      total += sum;
    }
    return finite ? std::sqrt(total) : std::numeric_limits<double>::infinity();
  }

  void update(std::size_t p, std::span<const GroupScalars> groups, float scale) {
    const GroupScalars& group = groups[static_cast<std::size_t>(spec(p).group)];
    kernels::UpdateSpans spans;
    spans.weight = masters_[p];
    spans.exp_avg = exp_avg_[p];
    const bool lion = spec(p).rule == UpdateRule::kLion;
    if (!lion) spans.exp_avg_sq = exp_avg_sq_[p];
    spans.gradient = accumulated_[p];
    kernels::UpdateScalars scalars;
    scalars.lr = group.lr;
    scalars.beta1 = group.beta1;
    scalars.beta2 = group.beta2;
    scalars.eps = group.eps;
    scalars.weight_decay = group.weight_decay;
    scalars.decoupled = options_.decoupled;
    if (lion) scalars.formula = kernels::Formula::kLion;
    scalars.step = steps_[p];
    scalars.gradient_scale = scale;
    kernels::update_reference(spans, scalars);
    if (spec(p).states == plan::StateForm::k8Bit) {
      keep_in_8_bits(kernels::signed_map8(), spans.exp_avg, false);
      keep_in_8_bits(kernels::unsigned_map8(), spans.exp_avg_sq, true);
    }
    weights_[p] = rounded(masters_[p], spec(p).dtype);
  }

  // All values of a parameter.
  static void keep_in_8_bits(const kernels::Map8& map, std::span<float> values, bool positive) {
    std::vector<std::uint8_t> codes(values.size());
    std::vector<float> scales(kernels::blocks8(values.size()));
    kernels::encode8(map, values, {codes.data(), scales.data()}, positive);
    kernels::decode8(map, {codes.data(), scales.data()}, values);
  }

  const FakeModel& model_;
  int world_;
  int shards_;
  ReferenceOptions options_;
  std::vector<Values> masters_;
  std::vector<std::vector<std::byte>> weights_;  // in their own dtype
  std::vector<Values> exp_avg_;
  std::vector<Values> exp_avg_sq_;
  std::vector<Values> accumulated_;                        // reduced, of this step
  std::vector<std::vector<Values>> of_group_;              // by shard group and parameter, reduced
  std::vector<std::vector<std::vector<std::byte>>> kept_;  // by rank and parameter
  std::vector<bool> came_;           // by parameter: some rank had a gradient in this step
  std::vector<std::int64_t> steps_;  // by parameter
};

}  // namespace strata::engine::fake
