#include "strata/engine/optimize/native_optimizer.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
NativeOptimizer::NativeOptimizer(OptimizerShards& shards, device::Device& device,
                                 offload::StateStore& states, UpdateRule rule,
                                 const EngineOptions& options, offload::LinkWatch& watch)
    : shards_(shards),
      device_(device),
      store_(states),
      watch_(watch),
      lanes_(options.lanes),
      states_(shards, states, rule, options),
      cache_(shards, states_, states, device, options.lanes.cache),
      dealer_(options.lanes) {
  for (const OptimizerShards::UnitShard& shard : shards.units()) {
    const Unit& unit = nth(shards.weights().units(), shard.unit);
    if (unit.layout.dtype() == DType::kFloat64) has_wide_weights_ = true;
  }
}

NativeOptimizer::~NativeOptimizer() {
  FirstError lost;       // a failed device runs nothing, and a destructor cannot report it
  lost.attempt([this] {  // what is cached need not go back
    if (update_ != nullptr) update_->synchronize();
    device_.compute_stream().synchronize();
  });
}

void NativeOptimizer::add(int unit, bool is_new) {
  if (!is_new) return;  // its states are there, and each step has left its parameter out
  const Unit& of = nth(shards_.weights().units(), unit);
  if (of.layout.dtype() == DType::kFloat64) has_wide_weights_ = true;
  for (const int param : of.spec.params) states_.add_param(param);
  if (states_.prepared()) states_.add({&shards_.units()[shards_.index_of(unit)], 1});
  drop_lanes();
  make_lanes();
}

NativeOptimizer::Far NativeOptimizer::far_of(const Unit& unit) const {
  if (!device_.runs_ahead()) return {};
  const memory::Tier tier = unit.spec.place.states.value_or(store_.tier());
  return {.states = tier != memory::Tier::kDevice && !cache_.has(unit.id),
          .gradient = shards_.gradients().on_host(unit.id),
          .weights = unit.offloaded && !cache_.has(unit.id)};
}

bool NativeOptimizer::host_can_update(const Unit& unit) const {
  const bool on_drive =
      unit.offloaded && shards_.weights().shards().tier_of(unit) != memory::Tier::kHost;
  return lanes_.threads > 0 && !is_muon(unit.id) && lanes_.which != UpdateWhere::kDevice &&
         !on_drive && shards_.states_on_host(unit) && shards_.gradients().on_host(unit.id) &&
         unit.layout.dtype() != DType::kFloat64 && !unit.spec.tile() && !cache_.has(unit.id);
}

// A device that does not run ahead works on the host's memory as on its own.
void NativeOptimizer::make_lanes() {
  if (!device_.runs_ahead()) return;
  cache_.note_start();
  bool far = false;
  bool helps = false;
  HostLane::Weights weights;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    far = far || far_of(unit).any();
    if (!host_can_update(unit)) continue;
    helps = true;
    if (unit.offloaded) continue;
    const Numel part = std::min(lanes_.part, unit.layout.shard());
    weights.largest = std::max(weights.largest, bytes_of(part, unit.layout.dtype()));
    weights.parts += unit.layout.shard().value / std::max(part.value, std::int64_t{1}) + 1;
  }
  // Weights in fp64 are rounded in the compute stream.
  if (far && !has_wide_weights_) update_ = device_.create_stream();
  if (helps) host_ = std::make_unique<HostLane>(device_, watch_, lanes_, weights);
}

void NativeOptimizer::drop_lanes() {
  cache_.drop();
  if (update_ != nullptr) update_->synchronize();
  device_.compute_stream().synchronize();
  host_.reset();
  update_.reset();
  if (muon_ != nullptr) muon_->free();
}

void NativeOptimizer::step(std::span<const GroupScalars> groups, const GradientScale& scale,
                           std::span<const int> first, const Updated& updated) {
  prepare();
  begin_step();
  states_.leave_out();
  const std::scoped_lock lock(cache_);
  const std::vector<int> units = order(first);
  if (update_ != nullptr) {
    update_->wait_for(*device_.compute_stream().record());
    if (host_ != nullptr && !early_.empty()) update_->wait_for(*host_->stream().record());
    const auto may = [this](const Unit& unit) {
      return shards_.states_on_host(unit) && shards_.gradients().filled(unit.id) &&
             !is_muon(unit.id);
    };
    cache_.begin_step(units, may, *update_, watch_);
  }
  const bool timed = host_ != nullptr && early_.empty();
  if (timed) began_ = stream().record_timed();
  if (host_ != nullptr) {
    const float known = scale.value;
    host_->begin(scale.on_host ? scale.on_host : [known] { return known; });
  }
  if (muon_ != nullptr) muon_->run(groups, scale.value);
  for (const int unit : units) {
    if (const auto early = early_.find(unit); early != early_.end()) {
      updated(unit, std::move(early->second));
      continue;
    }
    const OptimizerShards::UnitShard& shard = shards_.units()[shards_.index_of(unit)];
    if (shards_.gradients().filled(unit) && !is_muon(unit)) {
      for (const Part& part : deal(shard)) update(part, groups, scale);
      round_wide_weights(shard);
    }
    updated(unit, ended());
  }
  if (timed) ended_ = stream().record_timed();
  early_.clear();
  store_.advance();  // writes what was updated last
}

void NativeOptimizer::begin_step() {
  if (!early_.empty()) return;
  states_.count_step();
  dealer_.begin_step();
  on_device_ = Numel();
}

// Not with states on drives, whose memory for staging the pass's gathers use.
bool NativeOptimizer::update_early(int unit, std::span<const GroupScalars> groups) {
  const OptimizerShards::UnitShard& shard = shards_.units()[shards_.index_of(unit)];
  const Unit& of = nth(shards_.weights().units(), unit);
  const bool on_drive =
      shards_.states_on_drive(of) ||
      (of.offloaded && shards_.weights().shards().tier_of(of) == memory::Tier::kNvme);
  if (on_drive || is_muon(unit) || !of.frozen.empty() || of.layout.dtype() == DType::kFloat64)
    return false;
  prepare();
  begin_step();
  const std::scoped_lock lock(cache_);
  nth(shards_.weights().units(), unit).early = true;
  device::Event* const arrived = shards_.gradients().arrived(unit);
  if (update_ != nullptr) update_->wait_for(*device_.compute_stream().record());
  if (arrived != nullptr) stream().wait_for(*arrived);
  if (host_ != nullptr) {
    if (arrived != nullptr) host_->wait_for(*arrived);
    host_->begin([] { return 1.0F; });
  }
  for (const Part& part : deal(shard)) update(part, groups, {});
  early_[unit] = ended();
  return true;
}

void NativeOptimizer::forget_early() {  // other values will be written where these updates write
  FirstError lost;
  for (const auto& [unit, events] : std::exchange(early_, {}))
    for (const auto& event : events) lost.attempt([&] { event->wait(); });
}

// The ends of the work that was queued so far in other streams than the compute stream.
NativeOptimizer::Events NativeOptimizer::ended() {
  Events events;
  if (update_ != nullptr) events.push_back(update_->record());
  if (host_ != nullptr) events.push_back(host_->stream().record());
  return events;
}

// In parts that begin where those of other steps do, so that lanes share no page.
std::vector<NativeOptimizer::Part> NativeOptimizer::deal(const OptimizerShards::UnitShard& shard) {
  std::vector<Part> parts;
  const std::vector<NativeStates::Run> runs = states_.runs_of(shard);
  if (runs.empty()) return parts;
  const Numel last = runs.back().end;
  const bool both = host_ != nullptr && host_can_update(nth(shards_.weights().units(), shard.unit));
  for (Numel begin = runs.front().begin; begin < last;) {
    const Numel cut((begin / lanes_.part + 1) * lanes_.part.value);
    const Numel end = both ? std::min(cut, last) : last;
    parts.push_back({shard, begin, end, both && dealer_.to_host(end - begin)});
    if (both && !parts.back().on_host) on_device_ += end - begin;
    begin = end;
  }
  return parts;
}

void NativeOptimizer::throw_failure(bool waits) {
  if (host_ == nullptr) return;
  host_->throw_failure(waits);
  if (!waits || ended_ == nullptr) return;
  // Not the driver's own wait, which counts as one of the step's.
  while (!ended_->done()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  times_ = {{on_device_, ended_->seconds_since(*began_)}, host_->time()};
  dealer_.learn(*times_);
  ended_.reset();
}

// The kernel writes 16-bit weights beside their masters, but no fp64 ones.
void NativeOptimizer::round_wide_weights(const OptimizerShards::UnitShard& shard) {
  Weights& weights = shards_.weights();
  const Unit& unit = nth(weights.units(), shard.unit);
  if (unit.layout.dtype() != DType::kFloat64) return;
  for (const NativeStates::Run& run : states_.runs_of(shard))
    weights.masters().round(shard.unit, run.begin, run.end);
}

// As it rests, where the kernels know the dtype. Otherwise the compute stream widens it, unit by
// unit in the same memory.
GradientShards::Resting NativeOptimizer::gradient_of(const Unit& unit, bool on_host) {
  const GradientShards::Resting resting = shards_.gradients().resting(unit.id);
  const bool known = resting.dtype == DType::kFloat32 || resting.dtype == unit.layout.dtype();
  if (on_host || known) return resting;
  device_.compute_stream().wait_for(*stream().record());
  const std::span<float> wide = shards_.gradients().values(unit.id);
  stream().wait_for(*device_.compute_stream().record());
  return {std::as_bytes(wide)};
}

void NativeOptimizer::update(const Part& part, std::span<const GroupScalars> groups,
                             const GradientScale& scale) {
  const Unit& unit = nth(shards_.weights().units(), part.shard.unit);
  const std::vector<NativeStates::Run> runs = states_.runs_of(part.shard);
  const GradientShards::Resting gradient = gradient_of(unit, part.on_host);
  const Far far = far_of(unit);
  const bool adopts = unit.whole && unit.layout.dtype() == DType::kFloat64;
  device::Stream& stream = part.on_host ? host_->stream() : this->stream();
  const auto update_piece = [&](const StateRange& range, const WeightShards::Piece& piece) {
    WeightShards::Piece here = piece;
    if (part.on_host && !unit.offloaded) here.bytes = host_->bring(piece.bytes);
    if (adopts) {
      auto* const masters = reinterpret_cast<float*>(range.bytes(0).data());
      device_.adopt_written(
          {masters + (piece.begin - range.first).size(), (piece.end - piece.begin).size()},
          here.bytes.data(), unit.layout.dtype(), stream);
    }
    std::vector<HostLane::Run> on_host;
    const std::byte* const from =
        gradient.values.data() + bytes_of(piece.begin, gradient.dtype).size();
    states_.for_each_run(unit, runs, {range, here, from, gradient.dtype}, groups,
                         [&](kernels::UpdateSpans spans, kernels::UpdateScalars scalars) {
                           if (part.on_host) {
                             on_host.push_back({spans, scalars});
                             return;
                           }
                           spans.far = far.any();
                           scalars.gradient_scale = scale.value;
                           scalars.late_scale = scale.late;
                           device_.update_step(spans, scalars, stream);
                         });
    if (part.on_host) host_->update(std::move(on_host));
    if (piece.lease != nullptr) piece.lease->used_in(stream);
  };
  const auto update_range = [&](const StateRange& range) {
    const auto update_pieces = [&] {
      shards_.weights().shards().for_each(
          unit.id, range.low, range.high, offload::Access::kReadWrite, stream,
          [&](const WeightShards::Piece& piece) { update_piece(range, piece); });
    };
    const Numel numel = range.high - range.low;
    Bytes both;  // that go over the link in both directions
    if (far.weights) both += bytes_of(numel, unit.layout.dtype());
    for (const auto& lease : range.leases) both += Bytes(far.states ? lease->bytes().size() : 0);
    const Bytes up = both + (far.gradient ? bytes_of(numel, gradient.dtype) : Bytes());
    if (part.on_host) {
      update_pieces();
    } else {
      watch_.copy(offload::Link::kUp, up, stream,
                  [&] { watch_.copy(offload::Link::kDown, both, stream, update_pieces); });
    }
    for (const auto& lease : range.leases) lease->used_in(stream);
  };
  for_each_range(store_, states_.blocks(unit.id), unit.layout.shard(), part.begin, part.end,
                 offload::Access::kReadWrite, update_range);
}

}  // namespace strata::engine
