// The ledger: how many bytes the engine holds now, and held at most, by tier and kind. Everything
// that owns memory on the engine's behalf holds a Charge for as long as it owns it.
// Threads: internally synchronised. Ownership: a Charge keeps its ledger alive (shared_ptr).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "strata/base/units.h"

namespace strata::memory {

enum class Tier : std::uint8_t { kDevice, kHost, kNvme };
inline constexpr int kTierCount = 3;

enum class Kind : std::uint8_t {
  kWeights,         // weights that stay: shards, or whole units where the stage keeps them
  kGathered,        // weights of other ranks, held while a unit is in use, or by a script's views
  kGradients,       // flat gradient buffers on their way into a reduction
  kGradientShards,  // reduced and accumulated gradients of this rank's shards, fp32
  kMasterWeights,   // of this rank's shards: fp32 copies, or what bf16 weights lack of them
  kOptimizerState,  // exp_avg, exp_avg_sq, and what a user's optimizer keeps through the engine
  kActivations,     // inputs of checkpointed blocks, from forward to backward
  kStaging,         // buffers of loading, saving and I/O
  kWorkspace,       // partial results of a device's kernels, a few bytes a MiB that they go over
};
inline constexpr int kKindCount = 9;

std::string_view name_of(Tier tier);
std::string_view name_of(Kind kind);

class Ledger {
 public:
  // Without a kind: of the tier's total. Peaks are since construction or reset_peaks(), and a
  // tier's is not the sum of its kinds'.
  Bytes held(Tier tier, std::optional<Kind> kind = {}) const { return count_of(tier, kind).held; }
  Bytes peak(Tier tier, std::optional<Kind> kind = {}) const { return count_of(tier, kind).peak; }
  void reset_peaks();
  // How often memory of the tier was taken so far: charges made, and those that grew.
  std::int64_t charges(Tier tier) const;
  // One line for messages and logs: every tier that held something, its total and peak, and its
  // kinds that hold something now: "device 1.50 MiB (peak 2.00 MiB): weights 1.50 MiB; host 0 B
  // (peak 4.00 KiB)". "nothing held" when no tier ever did.
  std::string report() const;

 private:
  friend class Charge;
  void add(Tier tier, Kind kind, Bytes bytes);
  void remove(Tier tier, Kind kind, Bytes bytes) noexcept;

  struct Count {
    Bytes held;
    Bytes peak;
  };
  Count count_of(Tier tier, std::optional<Kind> kind) const;

  mutable std::mutex mutex_;
  std::array<std::array<Count, kKindCount>, kTierCount> by_kind_{};  // guarded by mutex_
  std::array<Count, kTierCount> by_tier_{};                          // guarded by mutex_
  std::array<std::int64_t, kTierCount> charges_{};                   // guarded by mutex_
};

// Bytes held; given back by the destructor. Movable. One without a ledger counts nothing.
class Charge {
 public:
  Charge() = default;
  Charge(std::shared_ptr<Ledger> ledger, Tier tier, Kind kind, Bytes bytes)
      : held_(ledger.get(), {ledger, tier, kind, Bytes()}) {
    grow(bytes);
  }
  Bytes bytes() const { return held_.get_deleter().bytes; }
  void grow(Bytes by);  // holds `by` (>= 0) more from now on

 private:
  struct GiveBack {
    std::shared_ptr<Ledger> ledger;
    Tier tier;
    Kind kind;
    Bytes bytes;
    void operator()(Ledger* from) const noexcept { from->remove(tier, kind, bytes); }
  };
  std::unique_ptr<Ledger, GiveBack> held_;  // null: without a ledger
};

}  // namespace strata::memory
