// Fingerprints of tensors' bytes (kernels::Fingerprint), by which ranks compare models without
// sending them. Tensors are cut into blocks of one size, many tensors at a time. The bits do not
// depend on where a tensor lies. Threads: one; those of `threads` share the work on the host.
// Ownership: borrows the device and the threads, and until flush() the bytes that were added and
// the targets of their fingerprints.
#pragma once

#include <span>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/base/units.h"
#include "strata/device/device.h"

namespace strata::torch {

inline constexpr std::size_t kFingerprintBytes = 16;

class Fingerprints {
 public:
  // All ranks that compare must use the same block. `device`: of tensors that are not on the host.
  Fingerprints(Bytes block, device::Device& device, ThreadPool& threads)
      : block_(block), device_(device), threads_(threads) {}

  // Fingerprints of the blocks of these bytes go to `target`, one after the other.
  void add(std::span<const std::byte> bytes, bool on_host, std::span<char> target);
  // Computes the fingerprints of all added bytes.
  void flush();

 private:
  struct Added {
    std::span<const std::byte> bytes;
    char* target;
  };
  void flush_device();

  Bytes block_;
  device::Device& device_;
  ThreadPool& threads_;
  std::vector<Added> on_device_;
  std::vector<Added> on_host_;  // a block each
};

// How many blocks a tensor of `bytes` is cut into.
std::size_t block_count(Bytes bytes, Bytes block);

}  // namespace strata::torch
