#include "strata/torch/start/comparison.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "strata/base/error.h"

namespace strata::torch {

static_assert(sizeof(kernels::Fingerprint) == kFingerprintBytes);

std::size_t block_count(Bytes bytes) {
  return static_cast<std::size_t>((bytes.value + kBlock.value - 1) / kBlock.value);
}

void Fingerprints::add(std::span<const std::byte> bytes, bool on_host, std::span<char> target) {
  STRATA_ASSERT(target.size() == block_count(Bytes(bytes.size())) * kFingerprintBytes);
  if (bytes.empty()) return;
  if (!on_host) {
    on_device_.push_back({bytes, target.data()});
    return;
  }
  char* next = target.data();
  for (std::size_t at = 0; at < bytes.size(); at += kBlock.size()) {
    on_host_.push_back({bytes.subspan(at, std::min(kBlock.size(), bytes.size() - at)), next});
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
  const auto sums = device_.fingerprints(runs, kBlock, device_.compute_stream());
  auto next = sums.begin();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::size_t blocks = block_count(Bytes(runs[i].size()));
    std::memcpy(on_device_[i].target, &*next, blocks * kFingerprintBytes);
    next += static_cast<std::ptrdiff_t>(blocks);
  }
  on_device_.clear();
}

Comparison::Comparison(comm::Collectives& collectives,
                       const std::vector<ModelParameter>& parameters)
    : collectives_(collectives) {
  first_.push_back(0);
  for (const ModelParameter& parameter : parameters) {
    const Bytes bytes(parameter.variable.nbytes());
    first_.push_back(first_.back() + (parameter.has_own_values() ? block_count(bytes) : 0));
  }
  differs_.resize(first_.back());
  if (!wanted()) return;
  found_.resize(first_.back() * kFingerprintBytes);
  given_.assign(first_.back(), '0');
}

std::span<char> Comparison::place_for(int param, std::size_t first, std::size_t count) {
  STRATA_ASSERT(wanted() && first_block(param) + first + count <= first_block(param + 1));
  const std::size_t begin = first_block(param) + first;
  std::fill_n(given_.begin() + static_cast<std::ptrdiff_t>(begin), count, '1');
  return std::span(found_).subspan(begin * kFingerprintBytes, count * kFingerprintBytes);
}

void Comparison::exchange() {
  if (!wanted()) return;
  const std::vector<std::string> all = collectives_.all_gather_text(found_ + given_);
  for (std::size_t i = 0; i < differs_.size(); ++i) {
    const auto at = [&](std::size_t rank) {
      return std::string_view(all[rank]).substr(i * kFingerprintBytes, kFingerprintBytes);
    };
    const auto given = [&](std::size_t rank) { return all[rank][found_.size() + i] == '1'; };
    for (std::size_t r = 1; r < all.size(); ++r)
      differs_[i] = differs_[i] || (given(0) && given(r) && at(r) != at(0));
    any_ = any_ || differs_[i];
  }
}

std::vector<Comparison::Run> Comparison::runs(int param, std::size_t most) const {
  std::vector<Run> runs;
  const std::size_t first = first_block(param);
  for (std::size_t i = first; i < first_block(param + 1); ++i) {
    const bool differs = differs_[i];
    const bool goes_on = !runs.empty() && runs.back().differs == differs &&
                         runs.back().end - runs.back().begin < most;
    if (!goes_on) runs.push_back({i - first, i - first, differs});
    ++runs.back().end;
  }
  return runs;
}

}  // namespace strata::torch
