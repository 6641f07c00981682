// 128 bits that tell the bytes of tensors apart, so that ranks compare models without sending them.
// Tensors are taken in pieces of one size. Two ways: XXH3 for memory of the host, and arithmetic
// that runs where the tensor lies, in a few passes of torch's own kernels, and gives the same bits
// on the host and on a GPU. Against accidents, not against somebody who looks for equal ones.
// Threads: one. Memory: a few times the piece, on the tensor's device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "strata/base/units.h"

namespace strata::torch {

inline constexpr std::size_t kFingerprintBytes = 16;

class Fingerprints {
 public:
  enum class Method { kHost, kAnywhere };
  // `piece`: a multiple of 8 bytes. Ranks that compare use the same method and piece.
  Fingerprints(Method method, Bytes piece);

  // Adds the pieces of a contiguous tensor; on the host where the method is kHost.
  void add(const at::Tensor& values);
  // Of all pieces added, in order, kFingerprintBytes each.
  std::string take();

 private:
  void add_words(const at::Tensor& words);

  Method method_;
  Bytes piece_;
  std::string hashes_;            // kHost
  std::vector<at::Tensor> sums_;  // kAnywhere: two numbers a piece, where the tensors lie
  at::Tensor multipliers_;        // by position, odd; on the device of the last tensor
};

// How many pieces a tensor of `bytes` is cut into.
std::int64_t piece_count(Bytes bytes, Bytes piece);

}  // namespace strata::torch
