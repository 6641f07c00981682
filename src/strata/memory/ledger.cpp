#include "strata/memory/ledger.h"

#include <fmt/core.h>

#include <algorithm>

#include "strata/base/error.h"

namespace strata::memory {
namespace {

std::size_t index_of(Tier tier) {
  return static_cast<std::size_t>(tier);
}
std::size_t index_of(Kind kind) {
  return static_cast<std::size_t>(kind);
}

}  // namespace

std::string_view name_of(Tier tier) {
  constexpr std::array<std::string_view, kTierCount> kNames{"device", "host", "nvme"};
  return kNames.at(index_of(tier));
}

std::string_view name_of(Kind kind) {
  constexpr std::array<std::string_view, kKindCount> kNames{
      "weights",         "gathered weights", "gradients", "gradient shards", "master weights",
      "optimizer state", "activations",      "staging",   "workspace"};
  return kNames.at(index_of(kind));
}

void Charge::grow(Bytes by) {
  STRATA_ASSERT(by.value >= 0);
  GiveBack& mine = held_.get_deleter();
  if (held_) held_->add(mine.tier, mine.kind, by);
  mine.bytes += by;
}

Ledger::Count Ledger::count_of(Tier tier, std::optional<Kind> kind) const {
  const std::lock_guard lock(mutex_);
  return kind ? by_kind_[index_of(tier)][index_of(*kind)] : by_tier_[index_of(tier)];
}

void Ledger::reset_peaks() {
  const std::lock_guard lock(mutex_);
  for (auto& kinds : by_kind_) {
    for (Count& count : kinds) count.peak = count.held;
  }
  for (Count& count : by_tier_) count.peak = count.held;
}

std::string Ledger::report() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (int t = 0; t < kTierCount; ++t) {
    const auto tier = static_cast<Tier>(t);
    const Count& total = by_tier_[index_of(tier)];
    if (total.peak == Bytes()) continue;
    text += fmt::format("{}{} {} (peak {})", text.empty() ? "" : "; ", name_of(tier),
                        to_string(total.held), to_string(total.peak));
    const char* separator = ": ";
    for (int k = 0; k < kKindCount; ++k) {
      const auto kind = static_cast<Kind>(k);
      const Count& count = by_kind_[index_of(tier)][index_of(kind)];
      if (count.held == Bytes()) continue;
      text += fmt::format("{}{} {}", separator, name_of(kind), to_string(count.held));
      separator = ", ";
    }
  }
  return text.empty() ? "nothing held" : text;
}

std::int64_t Ledger::charges(Tier tier) const {
  const std::lock_guard lock(mutex_);
  return charges_[index_of(tier)];
}

void Ledger::add(Tier tier, Kind kind, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  ++charges_[index_of(tier)];
  for (Count* count : {&by_kind_[index_of(tier)][index_of(kind)], &by_tier_[index_of(tier)]}) {
    count->held += bytes;
    count->peak = std::max(count->peak, count->held);
  }
}

void Ledger::remove(Tier tier, Kind kind, Bytes bytes) noexcept {
  const std::lock_guard lock(mutex_);
  by_kind_[index_of(tier)][index_of(kind)].held -= bytes;
  by_tier_[index_of(tier)].held -= bytes;
}

}  // namespace strata::memory
