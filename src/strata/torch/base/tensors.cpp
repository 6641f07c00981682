#include "strata/torch/base/tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/StorageImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <utility>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"

namespace strata::torch {
namespace {

using c10::ScalarType;

constexpr std::array<std::pair<DType, ScalarType>, 15> kPairs{{
    {DType::kFloat64, ScalarType::Double},
    {DType::kFloat32, ScalarType::Float},
    {DType::kFloat16, ScalarType::Half},
    {DType::kBFloat16, ScalarType::BFloat16},
    {DType::kFloat8E4M3, ScalarType::Float8_e4m3fn},
    {DType::kFloat8E5M2, ScalarType::Float8_e5m2},
    {DType::kInt64, ScalarType::Long},
    {DType::kInt32, ScalarType::Int},
    {DType::kInt16, ScalarType::Short},
    {DType::kInt8, ScalarType::Char},
    {DType::kUInt64, ScalarType::UInt64},
    {DType::kUInt32, ScalarType::UInt32},
    {DType::kUInt16, ScalarType::UInt16},
    {DType::kUInt8, ScalarType::Byte},
    {DType::kBool, ScalarType::Bool},
}};

at::Tensor on_host(const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                   std::size_t bytes) {
  void* const range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    throw OutOfMemoryError(
        "the system gives no address range of {} for a parameter that has no memory yet: {}",
        to_string(Bytes(bytes)), errno_text(errno));
  return at::from_blob(
      range, shape, [bytes](void* memory) { munmap(memory, bytes); },
      at::TensorOptions().dtype(dtype));
}

// Moves a dimension. The view keeps no reference to the tensor that it is of.
at::Tensor moved(const at::Tensor& tensor, bool moves, std::int64_t from, std::int64_t to) {
  const at::AutoDispatchBelowADInplaceOrView no_graph;
  return moves ? tensor.movedim(from, to) : tensor;
}

}  // namespace

DType from_scalar_type(c10::ScalarType type) {
  for (const auto& [dtype, scalar] : kPairs) {
    if (scalar == type) return dtype;
  }
  throw UsageError("parameters of dtype {} cannot be sharded; convert them first",
                   c10::toString(type));
}

c10::ScalarType to_scalar_type(DType dtype) {
  for (const auto& [own, scalar] : kPairs) {
    if (own == dtype) return scalar;
  }
  STRATA_ASSERT(false);
  return ScalarType::Undefined;
}

c10::intrusive_ptr<c10::StorageImpl> bare_storage(c10::Device place, std::size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<std::int64_t>(bytes)),
      c10::DataPtr(nullptr, place), nullptr, /*resizable=*/false);
}

at::Tensor tensor_in(const c10::intrusive_ptr<c10::StorageImpl>& storage, at::ScalarType dtype,
                     at::IntArrayRef shape, at::IntArrayRef strides) {
  const c10::DispatchKey key = c10::computeDispatchKey(dtype, c10::kStrided, storage->device());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape, strides);
  return tensor;
}

at::Tensor deferred_tensor(const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                           c10::Device place) {
  const std::size_t bytes =
      at::detail::computeStorageNbytesContiguous(shape, c10::elementSize(dtype));
  STRATA_ASSERT(bytes > 0);
  return place.is_cpu()
             ? on_host(shape, dtype, bytes)
             : tensor_in(bare_storage(place, bytes), dtype, shape, dense_strides(shape, false));
}

void back(const at::Tensor& tensor, const std::string& what) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (tensor.is_cpu()) {
    const Bytes wanted(storage.nbytes());
    const Bytes left = memory::available_memory();
    if (wanted > left)
      throw OutOfMemoryError("{} needs {} of host memory, and {} are left", what, to_string(wanted),
                             to_string(left));
    return;  // the system adds pages at the first write
  }
  const at::Tensor memory = at::zeros({static_cast<std::int64_t>(storage.nbytes())},
                                      at::TensorOptions().dtype(at::kByte).device(tensor.device()));
  memory.storage().unsafeGetStorageImpl()->set_nbytes(std::size_t{0});
  storage.set_data_ptr_noswap(memory.storage().unsafeGetStorageImpl()->set_data_ptr(
      c10::DataPtr(nullptr, tensor.device())));
}

std::uintptr_t storage_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return 0;
  return reinterpret_cast<std::uintptr_t>(tensor.storage().unsafeGetStorageImpl());
}

std::int64_t sharers(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.storage().use_count());
}

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
  return moved(tensor, channels_last, 1, -1);
}

at::Tensor from_memory_order(const at::Tensor& tensor, bool channels_last) {
  return moved(tensor, channels_last, -1, 1);
}

}  // namespace strata::torch
