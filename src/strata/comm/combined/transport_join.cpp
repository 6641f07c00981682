#include "strata/comm/combined/transport_join.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/combined/combined_collectives.h"

namespace strata::comm {
namespace {

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

}  // namespace

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

namespace {

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

JoinedTransports join_transports(BulkTransports wanted, const TransportFactories& makers) {
  return Join(wanted, makers).run();
}

BulkTransports choose_faster(BulkTransports wanted, const ProbedTransports& probed) {
  return {faster(wanted.gather, probed.peer.gather, probed.nccl.gather),
          faster(wanted.reduce, probed.peer.reduce, probed.nccl.reduce)};
}

}  // namespace strata::comm
