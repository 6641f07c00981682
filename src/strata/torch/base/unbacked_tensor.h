// Tensors that have a shape and an address but no memory yet: what constructors make of large
// parameters within zero.Init. On the host it is an address range whose pages come when somebody
// writes to them, and read as zeroes until then. On a GPU there is no memory until back().
// Threads: any. Errors: OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace strata::torch {

// Contiguous; on the host, or a GPU.
at::Tensor unbacked_tensor(const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                           c10::Device place);

// Gives it memory, of zeroes, for good. OutOfMemoryError where the host has less left than it
// needs, before any of it is taken: `what` says what the memory is for.
void back(const at::Tensor& tensor, const std::string& what);

// Tells memory apart, also where there is none yet; 0 for a tensor of no storage.
std::uintptr_t storage_of(const at::Tensor& tensor);

// Tensors, `tensor` itself among them, that share its memory.
std::int64_t sharers(const at::Tensor& tensor);

}  // namespace strata::torch
