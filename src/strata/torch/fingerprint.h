// Fingerprints of tensors' bytes, so that ranks compare models without sending them. Tensors are
// taken in pieces of one size. Two methods: XXH3 where every rank has its values on the host, and
// kernels::Fingerprint, which gives the same bits wherever a tensor lies.
// Threads: one; those of `threads` share the work on the host. Ownership: borrows the device and
// the threads, and tensors until take().
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/base/units.h"
#include "strata/device/device.h"

namespace strata::torch {

inline constexpr std::size_t kFingerprintBytes = 16;

class Fingerprints {
 public:
  enum class Method { kHost, kAnywhere };
  // Ranks that compare use the same method and piece. `device`: where tensors lie that are not on
  // the host.
  Fingerprints(Method method, Bytes piece, device::Device& device, ThreadPool& threads)
      : method_(method), piece_(piece), device_(device), threads_(threads) {}

  // Adds the pieces of a contiguous tensor; on the host where the method is kHost.
  void add(const at::Tensor& values);
  // Leaves zeroes in the place of one piece.
  void skip();
  // Computes what waits; until then the tensors' memory must stay.
  void flush();
  // Of all pieces added, in order, kFingerprintBytes each.
  std::string take();

 private:
  void add_on_host(std::span<const std::byte> bytes);

  Method method_;
  Bytes piece_;
  device::Device& device_;
  ThreadPool& threads_;
  std::string found_;
  std::vector<at::Tensor> waiting_;  // on the device; keeps them alive
};

// How many pieces a tensor of `bytes` is cut into.
std::int64_t piece_count(Bytes bytes, Bytes piece);

}  // namespace strata::torch
