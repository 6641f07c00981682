#include "strata/torch/fingerprint.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

std::span<const std::byte> bytes_of_tensor(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.nbytes())};
}

static_assert(sizeof(kernels::Fingerprint) == kFingerprintBytes);
static_assert(sizeof(XXH128_hash_t) == kFingerprintBytes);

}  // namespace

std::int64_t piece_count(Bytes bytes, Bytes piece) {
  return (bytes.value + piece.value - 1) / piece.value;
}

void Fingerprints::add(const at::Tensor& values) {
  STRATA_ASSERT(values.is_contiguous());
  if (values.numel() == 0) return;
  if (!values.is_cpu()) {
    STRATA_ASSERT(method_ == Method::kAnywhere);
    waiting_.push_back(values.detach());
    return;
  }
  flush();
  add_on_host(bytes_of_tensor(values));
}

void Fingerprints::add_on_host(std::span<const std::byte> bytes) {
  const std::int64_t pieces = piece_count(Bytes(bytes.size()), piece_);
  const std::size_t first = found_.size();
  found_.resize(first + static_cast<std::size_t>(pieces) * kFingerprintBytes);
  threads_.parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::size_t at = (piece_ * i).size();
      const auto piece = bytes.subspan(at, std::min(piece_.size(), bytes.size() - at));
      char* const target = found_.data() + first + static_cast<std::size_t>(i) * kFingerprintBytes;
      if (method_ == Method::kHost) {
        const XXH128_hash_t hash = XXH3_128bits(piece.data(), piece.size());
        std::memcpy(target, &hash, kFingerprintBytes);
      } else {
        const kernels::Fingerprint sums = kernels::fingerprint(piece, nullptr);
        std::memcpy(target, &sums, kFingerprintBytes);
      }
    }
  });
}

void Fingerprints::flush() {
  if (waiting_.empty()) return;
  std::vector<std::span<const std::byte>> runs;
  for (const at::Tensor& tensor : waiting_) runs.push_back(bytes_of_tensor(tensor));
  const auto sums = device_.fingerprints(runs, piece_, device_.compute_stream());
  found_.append(reinterpret_cast<const char*>(sums.data()), sums.size() * kFingerprintBytes);
  waiting_.clear();
}

void Fingerprints::skip() {
  flush();
  found_.append(kFingerprintBytes, '\0');
}

std::string Fingerprints::take() {
  flush();
  return std::exchange(found_, {});
}

}  // namespace strata::torch
