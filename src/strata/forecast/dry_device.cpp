#include "strata/forecast/dry_device.h"

namespace strata::forecast {

std::vector<kernels::Fingerprint> DryDevice::fingerprints(
    std::span<const std::span<const std::byte>> runs, Bytes piece, device::Stream&) {
  std::size_t pieces = 0;
  for (const auto run : runs) pieces += (run.size() + piece.size() - 1) / piece.size();
  return std::vector<kernels::Fingerprint>(pieces);
}

std::vector<kernels::GradStats> DryDevice::grad_stats(
    std::span<const std::span<const float>> gradients, device::Stream&) {
  return std::vector<kernels::GradStats>(gradients.size());
}

}  // namespace strata::forecast
