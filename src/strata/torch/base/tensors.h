// Torch's tensors in Strata's words: their element types and bytes, tensors without memory,
// and memory formats.
// Threads: any. Errors: UsageError, OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "strata/base/dtype.h"

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

// A storage of `bytes` bytes that has no memory yet.
c10::intrusive_ptr<c10::StorageImpl> bare_storage(c10::Device place, std::size_t bytes);

// A tensor in a storage that may have no memory. Made without set_(), whose bounds checks would
// need some.
at::Tensor tensor_in(const c10::intrusive_ptr<c10::StorageImpl>& storage, at::ScalarType dtype,
                     at::IntArrayRef shape, at::IntArrayRef strides);

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

// Torch's formats channels_last and channels_last_3d. The engine keeps such a parameter in the
// order of its memory, so the views of its slot are permuted and nothing is copied.

// Whether a tensor of 4 or 5 dimensions has the strides of the format, and not just those of a
// contiguous tensor. Weights of 1x1 convolutions have either: the strides of dimensions of size 1
// tell.
bool is_channels_last(const at::Tensor& tensor);

// The strides of a dense tensor.
std::vector<std::int64_t> dense_strides(at::IntArrayRef shape, bool channels_last);

// A view whose dimensions are in the order of the memory: [N, spatial dimensions, C] of a
// channels_last tensor; the tensor itself of others. from_memory_order() is the inverse.
at::Tensor in_memory_order(const at::Tensor& tensor, bool channels_last);
at::Tensor from_memory_order(const at::Tensor& tensor, bool channels_last);

}  // namespace strata::torch
