#include "strata/torch/start/adoption.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "strata/memory/host_buffer.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/start/host_transfer.h"
#include "strata/torch/start/lending.h"

namespace strata::torch {
namespace {

constexpr Bytes kReleasedAtOnce = 128_MiB;
constexpr std::size_t kBlocksSent = ValueIntake::kPiece / kBlock;

class Adoption {
 public:
  Adoption(engine::Engine& engine, c10::Device place, const std::vector<ModelParameter>& parameters,
           ThreadPool& threads, OriginalValues& originals, Bytes piece)
      : engine_(engine),
        place_(place),
        parameters_(parameters),
        threads_(threads),
        originals_(originals),
        comparison_(engine.collectives(), parameters),
        intake_(engine, place),
        piece_(piece) {
    for (const engine::Unit& unit : engine.weights().units()) {
      for (const int param : unit.spec.params) {
        if (originals.of(param).defined()) order_.push_back(param);
      }
    }
  }

  bool run(plan::InitTier tier) {
    if (take_from_rank_0(engine_, originals_, those(true), threads_.threads())) return false;
    const bool beside = tier == plan::InitTier::kBornFlat || tier == plan::InitTier::kDeviceCopy;
    store_from_host(&comparison_, beside || those(false).empty());
    if (comparison_.wanted()) {
      engine::InitReport::Phase phase(engine_.init_report(), "compare ranks", {});
      fingerprint_in_place();
      comparison_.exchange();
      if (comparison_.any()) engine_.gatherer().abandon_lazy_gather();  // its values will change
    }
    const bool distributed = tier == plan::InitTier::kDistributed && all_in_place();
    if (distributed && !comparison_.any()) {
      carry_own_parts_through_host();
      return false;
    }
    if (distributed || (tier == plan::InitTier::kHost && !those(false).empty())) {
      move_to_host();
      store_from_host(nullptr, true);
    }
    take_from_owners(engine_, intake_, parameters_, piece_);
    store_missing(tier == plan::InitTier::kDeviceGrow);
    return complete_;
  }

 private:
  // Whether the values come through a ring of buffers.
  bool on_host(int param) const { return originals_.of(param).device() != place_; }
  bool all_in_place() const { return order_.size() == parameters_.size() && those(true).empty(); }

  std::vector<int> those(bool on_host) const {
    std::vector<int> found;
    std::copy_if(order_.begin(), order_.end(), std::back_inserter(found),
                 [&](int param) { return this->on_host(param) == on_host; });
    return found;
  }

  // The bytes of whole parameters, or of this rank's `own` parts.
  Bytes bytes_of_values(const std::vector<int>& params, bool own) const {
    Bytes bytes;
    for (const int param : params) {
      const at::Tensor& values = originals_.of(param);
      const auto [begin, end] = engine_.weights().owned_range(param);
      bytes += Bytes(values.element_size()) * (own ? (end - begin).value : values.numel());
    }
    return bytes;
  }

  // The blocks of a parameter of which this rank keeps a part; only these must equal rank 0's. All
  // blocks on rank 0, in a unit that stays whole, and for values on the device.
  std::vector<bool> blocks_kept(int param) const {
    const at::Tensor& values = originals_.of(param);
    std::vector<bool> kept(block_count(Bytes(values.nbytes())), true);
    const bool all = engine_.weights().unit_of(param).whole || !values.is_cpu();
    if (comparison_.is_reference() || all) return kept;
    const auto [begin, end] = engine_.weights().owned_range(param);
    const Bytes element(values.element_size());
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const Bytes first = kBlock * static_cast<std::int64_t>(i);
      kept[i] = first < element * end.value && first + kBlock > element * begin.value;
    }
    return kept;
  }

  void add_fingerprints(Fingerprints& fingerprints, int param) {
    const at::Tensor& values = originals_.of(param);
    const at::Tensor flat = values.contiguous();
    const std::span<const std::byte> bytes = const_bytes(flat);
    const std::vector<bool> kept = blocks_kept(param);
    for (std::size_t i = 0; i < kept.size();) {
      std::size_t end = i + 1;
      while (end < kept.size() && kept[end] == kept[i]) ++end;
      const std::size_t first = i * kBlock.size();
      const std::size_t last = std::min(end * kBlock.size(), bytes.size());
      if (kept[i])
        fingerprints.add(bytes.subspan(first, last - first), flat.is_cpu(),
                         comparison_.place_for(param, i, end - i));
      i = end;
    }
    if (!values.is_contiguous()) fingerprints.flush();  // one copy at a time
  }

  void fingerprint_in_place() {
    if (!comparison_.wanted()) return;
    Fingerprints fingerprints(engine_.device(), threads_);
    for (const int param : those(false)) add_fingerprints(fingerprints, param);
    fingerprints.flush();
  }

  // Collective. Returns a function that begins to gather the units that stay whole, to be called
  // when every rank has stored its values. Null if there are none to gather, or if some rank has
  // values elsewhere than on the host.
  std::function<void()> gathering_early() {
    const bool all = order_.size() == parameters_.size() && those(false).empty();
    double least[] = {all ? 1.0 : 0.0};
    engine_.collectives().all_reduce(least, comm::ReduceOp::kMin);
    const comm::ShardPosition place = engine_.collectives().shard_position();
    if (least[0] == 0.0 || place.held_count() == 1 || place.parts > 1) return {};
    std::vector<int> whole;
    for (const engine::Unit& unit : engine_.weights().units()) {
      if (unit.whole) whole.push_back(unit.id);
    }
    if (whole.empty()) return {};
    return [this, whole = std::move(whole)] { engine_.gather_early(whole); };
  }

  // Stores this rank's own values from the host. With a comparison it computes fingerprints on the
  // way; values that differ from rank 0's are stored again later. Rank 0 fingerprints its whole
  // model, which takes long after it has stored its own part; units are gathered meanwhile.
  void store_from_host(Comparison* comparison, bool at_once) {
    const bool compares = comparison != nullptr && comparison->wanted();
    const std::function<void()> stored = compares ? gathering_early() : nullptr;
    const std::vector<int> params = those(true);
    if (params.empty()) return;
    engine::InitReport::Phase phase(engine_.init_report(), "move in",
                                    bytes_of_values(params, true));
    HostIntake intake(engine_, threads_, comparison, phase, at_once);
    for (const int param : params) {
      const at::Tensor values = originals_.of(param).contiguous();
      intake.add(param, Numel(), values);
      if (!originals_.of(param).is_contiguous()) intake.flush();  // one copy at a time
    }
    intake.flush(stored);
    engine_.device().compute_stream().synchronize();
    complete_ = complete_ && intake.complete();
  }

  // Stores the values of one parameter that the engine lacks: all, or rank 0's blocks that differ.
  void store_missing_of(int param) {
    const std::vector<Comparison::Run> runs = comparison_.runs(param, kBlocksSent);
    const bool equal =
        std::none_of(runs.begin(), runs.end(), [](const auto& run) { return run.differs; });
    if (equal && on_host(param)) return;
    const at::Tensor flat = originals_.of(param).contiguous().view({-1});
    const Numel block(kBlock / Bytes(flat.element_size()));
    for (const Comparison::Run& run : runs) {
      const Numel begin = block * static_cast<std::int64_t>(run.begin);
      const Numel end = std::min(block * static_cast<std::int64_t>(run.end), Numel(flat.numel()));
      const at::Tensor part = flat.narrow(0, begin.value, (end - begin).value);
      if (run.differs)
        intake_.store_from_rank_0(param, begin, part);
      else if (!on_host(param))
        intake_.store(param, begin, part);
    }
  }

  // `freeing`: the values' memory goes back to the system as the engine's grows.
  void store_missing(bool freeing) {
    if (!freeing) engine_.weights().back_all();
    engine::InitReport::Phase phase(engine_.init_report(), "place values",
                                    bytes_of_values(those(false), false));
    Bytes freed;
    for (const int param : order_) {
      const Bytes bytes(originals_.of(param).nbytes());
      store_missing_of(param);
      if (!on_host(param)) phase.moved(bytes);
      if (!freeing) continue;
      originals_.give_up(param);
      freed += bytes;
      if (freed < kReleasedAtOnce) continue;
      release_cached_memory(place_);  // the engine takes its memory past torch
      freed = Bytes();
    }
    engine_.device().compute_stream().synchronize();
  }

  // Copies of the values on the host: of whole parameters, or of this rank's `own` parts.
  std::vector<at::Tensor> copies_on_host(const std::vector<int>& params, bool own) {
    std::vector<at::Tensor> copies;
    engine::InitReport::Phase phase(engine_.init_report(), "move out",
                                    bytes_of_values(params, own));
    HostExport way(engine_, threads_, phase);
    for (const int param : params) {
      at::Tensor values = originals_.of(param).contiguous();
      if (own) {
        const auto [begin, end] = engine_.weights().owned_range(param);
        values = values.view({-1}).narrow(0, begin.value, (end - begin).value);
      }
      copies.push_back(empty_on_host(values));
      way.add(mutable_bytes(copies.back()), const_bytes(values));
      if (!originals_.of(param).is_contiguous()) way.flush();  // one copy at a time
    }
    way.flush();
    return copies;
  }

  // Moves all values from the device to the host and points the parameters at them.
  void move_to_host() {
    const std::vector<int> params = those(false);
    if (params.empty()) return;
    std::vector<at::Tensor> there = copies_on_host(params, false);
    for (std::size_t i = 0; i < params.size(); ++i) originals_.move(params[i], std::move(there[i]));
    release_cached_memory(place_);
  }

  // Copies each rank's own part of the values to the host, gives the values up, and stores the
  // parts: the device never holds both.
  void carry_own_parts_through_host() {
    const std::vector<at::Tensor> parts = copies_on_host(order_, true);
    const Bytes total = bytes_of_values(order_, true);
    for (const int param : order_) originals_.give_up(param);
    release_cached_memory(place_);
    engine::InitReport::Phase phase(engine_.init_report(), "move in", total);
    HostIntake intake(engine_, threads_, nullptr, phase, true);
    for (std::size_t i = 0; i < order_.size(); ++i)
      intake.add(order_[i], engine_.weights().owned_range(order_[i]).first, parts[i]);
    intake.flush();
    engine_.device().compute_stream().synchronize();
  }

  engine::Engine& engine_;
  c10::Device place_;
  const std::vector<ModelParameter>& parameters_;
  ThreadPool& threads_;
  OriginalValues& originals_;
  Comparison comparison_;
  ValueIntake intake_;
  Bytes piece_;             // that owners lend at once
  std::vector<int> order_;  // parameters with values, as the engine's memory grows
  bool complete_ = true;
};

at::Tensor nothing_like(const at::Tensor& variable) {
  return at::empty({0}, variable.options().requires_grad(false));
}

// Memory with another deleter may belong to an owner who still reads it.
bool is_of_torchs_allocator(const c10::Storage& storage) {
  const c10::Allocator* const allocator = storage.allocator();
  return allocator != nullptr && allocator->raw_deleter() != nullptr &&
         storage.data_ptr().get_deleter() == allocator->raw_deleter();
}

}  // namespace

std::string describe_values(const std::vector<ModelParameter>& parameters) {
  std::string text;
  for (const ModelParameter& parameter : parameters)
    fmt::format_to(
        std::back_inserter(text), "parameter {} is built as {}\n", parameter.name,
        parameter.has_own_values() ? c10::toString(parameter.variable.scalar_type()) : "empty");
  return text;
}

bool adopt_values(engine::Engine& engine, c10::Device place,
                  const std::vector<ModelParameter>& parameters, plan::InitTier tier,
                  ThreadPool& threads, OriginalValues& originals, Bytes piece) {
  const at::NoGradGuard no_grad;
  const bool complete = Adoption(engine, place, parameters, threads, originals, piece).run(tier);
  double least[] = {complete ? 1.0 : 0.0};
  engine.collectives().all_reduce(least, comm::ReduceOp::kMin);
  return least[0] > 0.0;
}

OriginalValues::OriginalValues(const std::vector<ModelParameter>& parameters,
                               std::span<const plan::ParamSpec> specs) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& variable = parameters[i].variable;
    const bool channels_last = specs[i].channels_last;
    params_.push_back({variable,
                       parameters[i].has_own_values()
                           ? in_memory_order(variable.detach(), channels_last)
                           : at::Tensor(),
                       variable.device(), channels_last});
  }
}

void OriginalValues::move(int param, at::Tensor values) {
  Param& moved = engine::nth(params_, param);
  moved.point_at(from_memory_order(values, moved.channels_last));
  moved.values = std::move(values);
}

void OriginalValues::give_up(int param) {
  Param& given_up = engine::nth(params_, param);
  given_up.point_at(nothing_like(given_up.values));
  given_up.values.reset();
  given_up.gone = true;
  ++given_up_;
}

std::vector<at::Tensor> OriginalValues::release() {
  std::vector<at::Tensor> handed_over;
  for (Param& param : params_) {
    at::Tensor& values = param.values;
    if (values.defined() && values.is_cpu() && values.use_count() == 1) {
      c10::StorageImpl* storage = values.storage().unsafeGetStorageImpl();
      if (values.storage().use_count() == 1 && storage->pyobj_slot()->load_pyobj() == nullptr)
        handed_over.push_back(std::move(values));
    }
    values.reset();
  }
  return handed_over;
}

void free(std::vector<at::Tensor> values) noexcept {
  for (at::Tensor& one : values) {
    const c10::Storage& storage = one.storage();
    if (is_of_torchs_allocator(storage))
      memory::give_back_pages({static_cast<std::byte*>(storage.mutable_data()), storage.nbytes()});
    one.reset();
  }
}

void OriginalValues::restore() noexcept {
  for (int i = 0; i < size(); ++i) {
    Param& param = engine::nth(params_, i);
    try {
      if (param.gone) param.point_at(nothing_like(param.variable));
      if (!param.values.defined()) continue;
      param.point_at(from_memory_order(param.values, param.channels_last));
      if (param.values.device() != param.home) move(i, param.values.to(param.home));
    } catch (const std::exception&) {
      continue;  // no room there now: the values are on the host
    }
  }
}

}  // namespace strata::torch
