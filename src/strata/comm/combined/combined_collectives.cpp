#include "strata/comm/combined/combined_collectives.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/combined/collectives_pair.h"

namespace strata::comm {
namespace {

class SplitCollectives final : public PairedCollectives {
 public:
  explicit SplitCollectives(std::shared_ptr<CollectivesPair> pair)
      : PairedCollectives(pair->first().rank(),
                          split_traits(pair->first().traits(), pair->second().traits()), pair,
                          pair->second().traits().one_sided ? pair->second() : pair->first()),
        name_(fmt::format("{}/{}", pair->first().name(), pair->second().name())) {}

  std::string_view name() const override { return name_; }
  device::Stream* stream(Traffic traffic) override {
    return (traffic == Traffic::kGathers ? gathers() : reductions()).stream(traffic);
  }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    return pair_->guarded([&]() -> std::unique_ptr<Work> {
      std::shared_ptr<Work> work = gathers().all_gather(slices, flat, tag);
      if (!gathers().traits().gathers_on_device && traits().gathers_on_device) {
        std::erase_if(started_, [](const auto& started) { return started.expired(); });
        started_.push_back(work);
      }
      return std::make_unique<PairWork>(pair_, std::move(work));
    });
  }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return pair_->guarded(
        [&] { return pair_work(pair_, reductions().reduce_scatter(reduction, tag)); });
  }

  std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) override {
    return pair_->guarded([&] { return pair_work(pair_, reductions().exchange(exchange, tag)); });
  }

  void record_times(bool on) override {
    gathers().record_times(on);
    reductions().record_times(on);
  }

  void all_reduce(std::span<double> values, ReduceOp op) override {
    pair_->guarded([&] { gathers().all_reduce(values, op); });
  }

  void all_gather_on_device(std::span<std::byte> all, std::span<const std::byte> mine) override {
    pair_->guarded([&] {
      // The exchange itself waits for gathers of its own collectives.
      for (const auto& gather : std::exchange(started_, {})) {
        if (const std::shared_ptr<Work> work = gather.lock()) work->wait();
      }
      Collectives& transport = gathers().traits().gathers_on_device ? gathers() : reductions();
      transport.all_gather_on_device(all, mine);
    });
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    pair_->guarded([&] { gathers().broadcast(bytes, root); });
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return pair_->guarded([&] { return gathers().all_gather_text(text); });
  }

  void barrier() override {
    pair_->guarded([&] {
      gathers().barrier();
      reductions().barrier();
    });
  }

 private:
  Collectives& gathers() const { return pair_->first(); }
  Collectives& reductions() const { return pair_->second(); }

  std::string name_;
  std::vector<std::weak_ptr<Work>> started_;  // gathers that an exchange has to wait for
};

Traits joint(Traits traits) {
  traits.one_sided = false;
  return traits;
}

class JointGathers final : public Collectives {
 public:
  JointGathers(std::shared_ptr<Collectives> inner, std::shared_ptr<device::Device> device,
               RankNames names)
      : Collectives(inner->rank(), joint(inner->traits())),
        inner_(std::move(inner)),
        device_(std::move(device)),
        names_(names) {}

  std::string_view name() const override { return inner_->name(); }
  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return inner_->allocate(std::move(name), bytes);
  }
  std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    return inner_->allocate_growing(std::move(name), bytes);
  }
  void unmap_freed() override { inner_->unmap_freed(); }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    if (slices.buffer != nullptr) return inner_->all_gather(slices, flat, tag);
    const BulkOperation gather = describe_gather(slices, flat, rank(), world_size(), tag);
    if (gather.source.empty()) return std::make_unique<CompletedWork>();
    make_room(slices.slice_bytes);
    // All ranks had read the other half at the last sync point, and this one at the point before.
    turn_ = 1 - turn_;
    const Bytes offset = slice_room_ * turn_;
    device::Stream& stream = slices.writer != nullptr ? *slices.writer : device_->compute_stream();
    device_->copy(staging_->local().subspan(offset.size(), gather.source.size()), gather.source,
                  stream);
    stream.synchronize();
    agree_on_operation(*inner_, gather.what, names_);
    inner_->all_gather({staging_.get(), offset, Bytes(), slices.slice_bytes}, flat, tag)->wait();
    device_->compute_stream().synchronize();
    return std::make_unique<CompletedWork>();
  }

  std::unique_ptr<Work> finish_gathers() override { return inner_->finish_gathers(); }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return inner_->reduce_scatter(reduction, tag);
  }
  std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) override {
    return inner_->exchange(exchange, tag);
  }
  device::Stream* stream(Traffic traffic) override { return inner_->stream(traffic); }
  std::unique_ptr<Inbox> make_inbox(std::string name, Bytes bytes) override {
    return inner_->make_inbox(std::move(name), bytes);
  }
  void record_times(bool on) override { inner_->record_times(on); }
  void all_reduce(std::span<double> values, ReduceOp op) override {
    inner_->all_reduce(values, op);
  }
  void all_gather_on_device(std::span<std::byte> all, std::span<const std::byte> mine) override {
    inner_->all_gather_on_device(all, mine);
  }
  void broadcast(std::span<std::byte> bytes, int root) override { inner_->broadcast(bytes, root); }
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return inner_->all_gather_text(text);
  }
  void barrier() override { inner_->barrier(); }
  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    inner_->announce_departure(words);
  }
  void all_left() noexcept override { inner_->all_left(); }

  void require_usable() override { inner_->require_usable(); }
  void end(Ending ending, std::string_view reason) noexcept override {
    inner_->end(ending, reason);
  }

 private:
  // All ranks come here with the same sizes, in the same order.
  void make_room(Bytes slice) {
    if (staging_ != nullptr && slice <= slice_room_) return;
    inner_->barrier();  // no rank reads the memory that is freed now
    staging_.reset();
    slice_room_ = align_up(slice, 4_KiB);
    staging_ = inner_->allocate(fmt::format("joint gathers {}", ++allocated_), slice_room_ * 2);
  }

  std::shared_ptr<Collectives> inner_;
  std::shared_ptr<device::Device> device_;
  RankNames names_;
  std::unique_ptr<SharedBuffer> staging_;  // two slices
  Bytes slice_room_;
  int allocated_ = 0;
  int turn_ = 0;
};

constexpr int kRounds = 4;  // the first one maps memory, and does not count
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Room {
  std::unique_ptr<SharedBuffer> weights;
  std::unique_ptr<SharedBuffer> gradients;
  std::unique_ptr<device::Memory> flat;
  std::unique_ptr<device::Memory> result;
};

template <typename Start>
double seconds_of(Collectives& collectives, device::Device& device, const Start& start) {
  double best = kNever;
  for (int round = 0; round < kRounds; ++round) {
    collectives.barrier();
    device.compute_stream().synchronize();
    const auto begin = std::chrono::steady_clock::now();
    start()->wait();
    device.compute_stream().synchronize();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    if (round > 0) best = std::min(best, spent.count());
  }
  return best;
}

// NCCL must be faster by this factor, alone, to be taken: its kernels take processors from the
// model's, copy engines do not.
constexpr double kNcclMustBe = 1.5;

TransportKind faster(TransportKind wanted, double peer, double nccl) {
  if (wanted != TransportKind::kAuto) return wanted;
  return std::isfinite(peer) && nccl * kNcclMustBe < peer ? TransportKind::kNccl
                                                          : TransportKind::kPeer;
}

std::string describe(BulkTransports chosen, const ProbedTransports& probed, double seconds) {
  const auto figures = [](const ProbeTimes& times) {
    return fmt::format("{:.2f} and {:.2f} ms", times.gather * 1e3, times.reduce * 1e3);
  };
  return fmt::format(
      "gathers go over {}, reductions over {}; a gather of 64 MiB and the reduction of its "
      "gradients: peer {}, nccl {} (probed in {:.0f} ms)",
      name_of(chosen.gather), name_of(chosen.reduce), figures(probed.peer), figures(probed.nccl),
      seconds * 1e3);
}

// The transports that were made, for one set of ranks.
class Join {
 public:
  Join(BulkTransports wanted, const TransportFactories& makers)
      : wanted_(wanted), makers_(makers) {}

  JoinedTransports run() {
    if (wanted_ != BulkTransports{TransportKind::kNccl, TransportKind::kNccl}) make_peers();
    const bool probes = makers_.nccl_runs && wanted_.has(TransportKind::kAuto);
    if (wanted_.has(TransportKind::kNccl) || probes) make_nccl();
    JoinedTransports joined;
    if (probes && peers_ != nullptr) joined.probe = probe();
    const auto transport = [&](TransportKind kind) {
      return kind == TransportKind::kNccl ? nccl_ : peers_;
    };
    auto gathers = transport(wanted_.gather);
    auto reductions = transport(wanted_.reduce);
    joined.collectives = gathers == reductions
                             ? std::move(gathers)
                             : make_split_collectives(std::move(gathers), std::move(reductions));
    return joined;
  }

 private:
  void make_peers() {
    try {
      peers_ = makers_.peers();
    } catch (const CommError& error) {
      if (wanted_.has(TransportKind::kPeer) || !makers_.nccl) throw;
      without_peers_ = fmt::format("the GPUs do not reach each other's memory: {}", error.what());
      makers_.say(true,
                  fmt::format("weights and gradients go through NCCL, since {}", without_peers_));
      wanted_ = {TransportKind::kNccl, TransportKind::kNccl};
    }
  }

  void make_nccl() {
    try {
      nccl_ = makers_.nccl();
    } catch (const CommError& error) {
      if (without_peers_.empty()) throw;
      throw CommError("{}\nNCCL was to carry weights and gradients, since {}", error.what(),
                      without_peers_);
    }
  }

  ProbedTransports probe() {
    const auto began = std::chrono::steady_clock::now();
    ProbedTransports probed;
    probed.peer = makers_.probe(*peers_);
    probed.nccl = makers_.probe(*nccl_);
    wanted_ = choose_faster(wanted_, probed);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
    makers_.say(false, describe(wanted_, probed, spent.count()));
    return probed;
  }

  BulkTransports wanted_;
  const TransportFactories& makers_;
  std::shared_ptr<Collectives> peers_;
  std::shared_ptr<Collectives> nccl_;
  std::string without_peers_;  // why; empty: they were made, or not tried
};

}  // namespace

std::unique_ptr<Collectives> make_split_collectives(std::shared_ptr<Collectives> gathers,
                                                    std::shared_ptr<Collectives> reductions) {
  STRATA_ASSERT(!gathers->traits().one_sided || !reductions->traits().one_sided);
  STRATA_ASSERT(gathers->rank() == reductions->rank() &&
                gathers->world_size() == reductions->world_size());
  STRATA_ASSERT(gathers->shard_position().groups == 1 && gathers->shard_position().parts == 1);
  return std::make_unique<SplitCollectives>(
      std::make_shared<CollectivesPair>(std::move(gathers), std::move(reductions)));
}

std::shared_ptr<Collectives> make_joint_gathers(std::shared_ptr<Collectives> inner,
                                                std::shared_ptr<device::Device> device,
                                                RankNames names) {
  STRATA_ASSERT(inner->traits().one_sided && inner->shard_position().groups == 1);
  return std::make_shared<JointGathers>(std::move(inner), std::move(device), names);
}

ProbeTimes probe(Collectives& collectives, device::Device& device, const ProbedDTypes& dtypes) {
  const int world = collectives.world_size();
  const Numel numel(kProbeBytes.value / size_of(dtypes.weights).value / world);  // of a slice
  const bool narrow =
      collectives.traits().sums_in_fp32 && size_of(dtypes.weights) < size_of(dtypes.reduce);
  const DType carried = narrow ? dtypes.weights : dtypes.reduce;
  const Bytes slice = bytes_of(numel, dtypes.weights);
  Room room;
  double refused[] = {0.0};
  try {
    room.weights = collectives.allocate("probe.weights", slice);
    room.gradients = collectives.allocate("probe.gradients", bytes_of(numel, carried) * world);
    room.flat = device.allocate_uncharged(slice * world);
    room.result = device.allocate_uncharged(bytes_of(numel, DType::kFloat32));
  } catch (const OutOfMemoryError&) {
    refused[0] = 1.0;
  }
  collectives.all_reduce(refused, ReduceOp::kMax);
  if (refused[0] != 0.0) return {kNever, kNever};
  for (const auto bytes : {room.weights->local(), room.gradients->local()})
    device.fill_zero(bytes, device.compute_stream());

  double times[] = {0.0, 0.0};
  times[0] = seconds_of(collectives, device, [&] {
    return collectives.all_gather({room.weights.get(), Bytes(), Bytes(), slice}, room.flat->bytes(),
                                  "probe");
  });
  Reduction reduction;
  reduction.source = room.gradients.get();
  reduction.dtype = carried;
  reduction.result = {reinterpret_cast<float*>(room.result->bytes().data()),
                      static_cast<std::size_t>(numel.value)};
  times[1] = seconds_of(collectives, device,
                        [&] { return collectives.reduce_scatter(reduction, "probe"); });
  collectives.all_reduce(times, ReduceOp::kMax);
  collectives.barrier();  // no rank reads the memory that is freed now
  return {times[0], times[1]};
}

JoinedTransports join_transports(BulkTransports wanted, const TransportFactories& makers) {
  return Join(wanted, makers).run();
}

BulkTransports choose_faster(BulkTransports wanted, const ProbedTransports& probed) {
  return {faster(wanted.gather, probed.peer.gather, probed.nccl.gather),
          faster(wanted.reduce, probed.peer.reduce, probed.nccl.reduce)};
}

}  // namespace strata::comm
