// The report of `strata plan` for people, out of that for programs; and the rows that both have.
// Values; pure functions.
#pragma once

#include <array>

#include "strata/cli/commands.h"

namespace strata::cli {

// A tier that the ranks of a host share.
struct SharedTier {
  memory::Tier tier;
  const char* key;       // in JSON: what it holds
  const char* fits_key;  // and whether that fits
  const char* label;     // of rows
  const char* noun;
  std::optional<Bytes> PlanRequest::*room;
};

inline constexpr std::array<SharedTier, 2> kSharedTiers{
    {{memory::Tier::kHost, "host", "host_fits", "host", "the host", &PlanRequest::host_memory},
     {memory::Tier::kNvme, "nvme", "nvme_fits", "NVMe", "the drive", &PlanRequest::nvme_space}}};

// Calls use(kind, name) for every kind.
template <typename Use>
void for_each_kind(const Use& use) {
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    use(kind, std::string(name_of(kind)));
  }
}

inline bool is_planned(memory::Kind kind) {
  return kind != memory::Kind::kWorkspace;  // memory of kernels is not planned
}

// Whatever was asked fits.
inline bool fits_all(const nlohmann::json& stage) {
  return stage["fits"] != false && stage["host_fits"] != false && stage["nvme_fits"] != false;
}

std::string text_of_plan(const PlanRequest& request, const nlohmann::json& plan);

}  // namespace strata::cli
