#include "strata/torch/fingerprint.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <algorithm>
#include <span>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

constexpr std::int64_t kWord = 8;
// Between the multipliers of the first sum and those of the second.
constexpr std::int64_t kShift = 1024;
// Odd numbers without structure (of the fractional parts of square roots).
constexpr std::int64_t kMix1 = 0x6a09e667f3bcc909;
constexpr std::int64_t kMix2 = 0x3c6ef372fe94f82b;

// An aligned run of words; bytes that are missing at the end are zero.
at::Tensor words_of(const at::Tensor& bytes) {
  const std::int64_t numel = bytes.numel();
  const bool aligned = reinterpret_cast<std::uintptr_t>(bytes.const_data_ptr()) % kWord == 0 &&
                       bytes.storage_offset() % kWord == 0;
  if (aligned && numel % kWord == 0) return bytes.view(at::kLong);
  at::Tensor padded = at::zeros({align_up(Bytes(numel), Bytes(kWord)).value}, bytes.options());
  padded.narrow(0, 0, numel).copy_(bytes);
  return padded.view(at::kLong);
}

// High bits take part in what follows: products carry upwards only.
void fold_down(at::Tensor& words) {
  words.bitwise_xor_(words.bitwise_right_shift(32));
}

at::Tensor make_multipliers(std::int64_t count, c10::Device device) {
  at::Tensor result = at::arange(1, count + 1, at::TensorOptions().dtype(at::kLong).device(device));
  result.mul_(kMix1);
  fold_down(result);
  result.mul_(kMix2);
  fold_down(result);
  return result.bitwise_or_(1);
}

}  // namespace

std::int64_t piece_count(Bytes bytes, Bytes piece) {
  return (bytes.value + piece.value - 1) / piece.value;
}

Fingerprints::Fingerprints(Method method, Bytes piece) : method_(method), piece_(piece) {
  STRATA_ASSERT(piece.value > 0 && piece.value % kWord == 0);
}

void Fingerprints::add(const at::Tensor& values) {
  STRATA_ASSERT(values.is_contiguous());
  if (values.numel() == 0) return;
  const at::Tensor bytes = values.detach().view({-1}).view(at::kByte);
  for (std::int64_t begin = 0; begin < bytes.numel(); begin += piece_.value) {
    const std::int64_t count = std::min(piece_.value, bytes.numel() - begin);
    const at::Tensor piece = bytes.narrow(0, begin, count);
    if (method_ == Method::kAnywhere) {
      add_words(words_of(piece));
      continue;
    }
    const XXH128_hash_t hash =
        XXH3_128bits(piece.const_data_ptr(), static_cast<std::size_t>(count));
    hashes_.append(reinterpret_cast<const char*>(&hash), kFingerprintBytes);
  }
}

void Fingerprints::add_words(const at::Tensor& words) {
  if (!multipliers_.defined() || multipliers_.device() != words.device()) {
    multipliers_ = make_multipliers(piece_.value / kWord + kShift, words.device());
  }
  const std::int64_t count = words.numel();
  at::Tensor mixed = words.bitwise_xor(words.bitwise_right_shift(32));
  mixed.mul_(multipliers_.narrow(0, 0, count));
  fold_down(mixed);
  sums_.push_back(mixed.sum());
  mixed.mul_(multipliers_.narrow(0, kShift, count));
  sums_.push_back(mixed.sum());
}

std::string Fingerprints::take() {
  std::string result = std::move(hashes_);
  hashes_.clear();
  if (sums_.empty()) return result;
  for (at::Tensor& sum : sums_) sum = sum.to(sums_.front().device());
  const at::Tensor all = at::stack(sums_).cpu();
  sums_.clear();
  result.append(static_cast<const char*>(all.const_data_ptr()), all.nbytes());
  return result;
}

}  // namespace strata::torch
