// Torch's tensors in Strata's words: their element types and bytes, and tensors without memory.
// Threads: any. Errors: UsageError, OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata::torch {

// Throws UsageError for types that parameters cannot have here (complex, quantised).
DType from_scalar_type(c10::ScalarType type);
c10::ScalarType to_scalar_type(DType dtype);

// The bytes of a contiguous tensor.
inline std::span<const std::byte> const_bytes(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}
inline std::span<std::byte> mutable_bytes(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// Deferred tensors have a shape and an address range but no memory yet. Within zero.Init
// constructors make large parameters this way. On the host, the system adds each page when a thread
// first writes to it; until then it reads as zeroes. On a GPU there is no memory until back().
// Contiguous; on the host, or a GPU.
at::Tensor deferred_tensor(const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                           c10::Device place);

// Gives the tensor memory for good, filled with zeroes. OutOfMemoryError if the host has less
// memory available than the tensor needs; nothing is taken then. `what` names the use of the memory
// in the message.
void back(const at::Tensor& tensor, const std::string& what);

// Identifies the storage, even before it has memory; 0 for a tensor without storage.
std::uintptr_t storage_of(const at::Tensor& tensor);

// The number of tensors that share this tensor's memory, including itself.
std::int64_t sharers(const at::Tensor& tensor);

}  // namespace strata::torch
