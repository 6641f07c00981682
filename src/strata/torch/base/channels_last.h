// Tensors in torch's channels_last and channels_last_3d formats. The engine keeps such a parameter
// in the order of its memory, so the views of its slot are permuted and nothing is copied.
// Pure functions. Threads: any. Errors: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace strata::torch {

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
