#include "strata/comm/combined/carrier_join.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/combined/split_collectives.h"

namespace strata::comm {
namespace {

// NCCL must be faster by this factor, alone, to be taken: its kernels take processors from the
// model's, copy engines do not.
constexpr double kNcclMustBe = 1.5;

CarrierKind faster(CarrierKind wanted, double peer, double nccl) {
  if (wanted != CarrierKind::kAuto) return wanted;
  return std::isfinite(peer) && nccl * kNcclMustBe < peer ? CarrierKind::kNccl : CarrierKind::kPeer;
}

std::string describe(BulkCarriers chosen, const ProbedCarriers& probed, double seconds) {
  const auto figures = [](const ProbeTimes& times) {
    return fmt::format("{:.2f} and {:.2f} ms", times.gather * 1e3, times.reduce * 1e3);
  };
  return fmt::format(
      "gathers go over {}, reductions over {}; a gather of 64 MiB and the reduction of its "
      "gradients: peer {}, nccl {} (probed in {:.0f} ms)",
      name_of(chosen.gather), name_of(chosen.reduce), figures(probed.peer), figures(probed.nccl),
      seconds * 1e3);
}

// The carriers that were made, for one set of ranks.
class Join {
 public:
  Join(BulkCarriers wanted, const CarrierMakers& makers) : wanted_(wanted), makers_(makers) {}

  JoinedCarriers run() {
    if (wanted_ != BulkCarriers{CarrierKind::kNccl, CarrierKind::kNccl}) make_peers();
    const bool probes = makers_.nccl_runs && wanted_.has(CarrierKind::kAuto);
    if (wanted_.has(CarrierKind::kNccl) || probes) make_nccl();
    JoinedCarriers joined;
    if (probes && peers_ != nullptr) joined.probe = probe();
    const auto carrier = [&](CarrierKind kind) {
      return kind == CarrierKind::kNccl ? nccl_ : peers_;
    };
    auto gathers = carrier(wanted_.gather);
    auto reductions = carrier(wanted_.reduce);
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
      if (wanted_.has(CarrierKind::kPeer) || !makers_.nccl) throw;
      without_peers_ = fmt::format("the GPUs do not reach each other's memory: {}", error.what());
      makers_.say(true,
                  fmt::format("weights and gradients go through NCCL, since {}", without_peers_));
      wanted_ = {CarrierKind::kNccl, CarrierKind::kNccl};
    }
  }

  void make_nccl() {
    try {
      nccl_ = makers_.nccl();
    } catch (const CommError& error) {
      if (without_peers_.empty()) throw;
      throw CommError(fmt::format("{}\nNCCL was to carry weights and gradients, since {}",
                                  error.what(), without_peers_));
    }
  }

  ProbedCarriers probe() {
    const auto began = std::chrono::steady_clock::now();
    ProbedCarriers probed;
    probed.peer = makers_.probe(*peers_);
    probed.nccl = makers_.probe(*nccl_);
    wanted_ = choose_faster(wanted_, probed);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
    makers_.say(false, describe(wanted_, probed, spent.count()));
    return probed;
  }

  BulkCarriers wanted_;
  const CarrierMakers& makers_;
  std::shared_ptr<Collectives> peers_;
  std::shared_ptr<Collectives> nccl_;
  std::string without_peers_;  // why; empty: they were made, or not tried
};

}  // namespace

JoinedCarriers join_carriers(BulkCarriers wanted, const CarrierMakers& makers) {
  return Join(wanted, makers).run();
}

BulkCarriers choose_faster(BulkCarriers wanted, const ProbedCarriers& probed) {
  return {faster(wanted.gather, probed.peer.gather, probed.nccl.gather),
          faster(wanted.reduce, probed.peer.reduce, probed.nccl.reduce)};
}

}  // namespace strata::comm
