#include "strata/torch/base/channels_last.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>
#include <numeric>

namespace strata::torch {
namespace {

// The view keeps no reference to the tensor that it is of.
at::Tensor permuted(const at::Tensor& tensor, const std::vector<std::int64_t>& order) {
  const at::AutoDispatchBelowADInplaceOrView no_graph;
  return tensor.permute(order);
}

// 0, 2, 3, 1 of 4 dimensions.
std::vector<std::int64_t> memory_order(std::int64_t dimensions) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(dimensions));
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin() + 1, order.begin() + 2, order.end());
  return order;
}

}  // namespace

bool is_channels_last(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.numel() == 0) return false;
  if (tensor.dim() != 4 && tensor.dim() != 5) return false;
  const auto format =
      tensor.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  if (!tensor.is_contiguous(format)) return false;
  if (!tensor.is_contiguous()) return true;
  return tensor.strides() == at::IntArrayRef(dense_strides(tensor.sizes(), true)) &&
         tensor.strides() != at::IntArrayRef(dense_strides(tensor.sizes(), false));
}

std::vector<std::int64_t> dense_strides(at::IntArrayRef shape, bool channels_last) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t next = 1;
  const auto add = [&](std::size_t dimension) {
    strides[dimension] = next;
    next *= std::max<std::int64_t>(1, shape[dimension]);
  };
  if (channels_last) add(1);
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (!channels_last || i != 1) add(i);
  }
  return strides;
}

at::Tensor in_memory_order(const at::Tensor& tensor, bool channels_last) {
  return channels_last ? permuted(tensor, memory_order(tensor.dim())) : tensor;
}

at::Tensor from_memory_order(const at::Tensor& tensor, bool channels_last) {
  if (!channels_last) return tensor;
  std::vector<std::int64_t> order(static_cast<std::size_t>(tensor.dim()));
  const std::vector<std::int64_t> there = memory_order(tensor.dim());
  for (std::size_t i = 0; i < there.size(); ++i)
    order[static_cast<std::size_t>(there[i])] = static_cast<std::int64_t>(i);
  return permuted(tensor, order);
}

}  // namespace strata::torch
