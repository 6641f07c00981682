#include "strata/torch/start/fingerprint.h"

#include <algorithm>
#include <cstring>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

static_assert(sizeof(kernels::Fingerprint) == kFingerprintBytes);

}  // namespace

std::size_t block_count(Bytes bytes, Bytes block) {
  return static_cast<std::size_t>((bytes.value + block.value - 1) / block.value);
}

void Fingerprints::add(std::span<const std::byte> bytes, bool on_host, std::span<char> target) {
  STRATA_ASSERT(target.size() == block_count(Bytes(bytes.size()), block_) * kFingerprintBytes);
  if (bytes.empty()) return;
  if (!on_host) {
    on_device_.push_back({bytes, target.data()});
    return;
  }
  char* next = target.data();
  for (std::size_t at = 0; at < bytes.size(); at += block_.size()) {
    on_host_.push_back({bytes.subspan(at, std::min(block_.size(), bytes.size() - at)), next});
    next += kFingerprintBytes;
  }
}

void Fingerprints::flush() {
  threads_.parallel_for(
      static_cast<std::int64_t>(on_host_.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
          const kernels::Fingerprint sums = kernels::fingerprint(on_host_[i].bytes, nullptr);
          std::memcpy(on_host_[i].target, &sums, kFingerprintBytes);
        }
      });
  on_host_.clear();
  flush_device();
}

void Fingerprints::flush_device() {
  if (on_device_.empty()) return;
  std::vector<std::span<const std::byte>> runs;
  for (const Added& each : on_device_) runs.push_back(each.bytes);
  const auto sums = device_.fingerprints(runs, block_, device_.compute_stream());
  auto next = sums.begin();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::size_t blocks = block_count(Bytes(runs[i].size()), block_);
    std::memcpy(on_device_[i].target, &*next, blocks * kFingerprintBytes);
    next += static_cast<std::ptrdiff_t>(blocks);
  }
  on_device_.clear();
}

}  // namespace strata::torch
