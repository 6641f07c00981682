#include "strata/torch/model/parameter_storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "strata/base/error.h"
#include "strata/torch/base/tensors.h"

namespace c10 {
namespace {

// torch can make a storage unreadable but not readable again; this class needs both in turn. An
// explicit instantiation may name a private member; with a torch that lacks the member it does not
// compile.
template <bool StorageImpl::*Flag>
struct UnreadableFlag {
  friend bool& unreadable(StorageImpl& storage) { return storage.*Flag; }
};
template struct UnreadableFlag<&StorageImpl::throw_on_immutable_data_ptr_>;
bool& unreadable(StorageImpl& storage);

}  // namespace
}  // namespace c10

namespace strata::torch {
namespace {

constexpr const char* kReleased =
    "this tensor shares memory with a parameter that the engine has released, while the graph of a "
    "forward still needs that parameter; read it within strata.zero.GatheredParameters, or make a "
    "copy there (tensor.detach().clone()) that stays";

// A view made without set_(), whose bounds checks would need memory behind the storage.
at::Tensor make_view(at::ScalarType scalar, c10::IntArrayRef shape, c10::Device place) {
  std::size_t bytes = c10::elementSize(scalar);
  for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<std::int64_t>(bytes)),
      c10::DataPtr(nullptr, place), nullptr, /*resizable=*/false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(kReleased);
  const c10::DispatchKey key = c10::computeDispatchKey(scalar, c10::kStrided, place);
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                             c10::DispatchKeySet(key),
                                                             c10::scalarTypeToTypeMeta(scalar));
  view.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return view;
}

c10::StorageImpl& storage_of_view(const at::Tensor& view) {
  return *view.storage().unsafeGetStorageImpl();
}

void set_memory(c10::StorageImpl& storage, c10::DataPtr memory) {
  c10::unreadable(storage) = memory.get() == nullptr;
  storage.set_data_ptr_noswap(std::move(memory));
}

void delete_owner(void* owner) {
  delete static_cast<std::shared_ptr<void>*>(owner);
}

}  // namespace

void point(const at::Tensor& variable, const at::Tensor& view) {
  variable.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
}

ParameterStorage::ParameterStorage(const plan::ParamSpec& spec, Numel offset, c10::Device place)
    : offset_(offset), view_(make_view(to_scalar_type(spec.dtype), spec.shape, place)) {}

void ParameterStorage::give(std::byte* flat) {
  forget_moved();
  given_ = flat + offset_.size() * c10::elementSize(view_.scalar_type());
  set_memory(storage_of_view(view_), c10::DataPtr(given_, view_.device()));
}

void ParameterStorage::take() {
  forget_moved();
  given_ = nullptr;
  set_memory(storage_of_view(view_), c10::DataPtr(nullptr, view_.device()));
}

void ParameterStorage::leave(std::shared_ptr<void> owner) {
  forget_moved();
  auto context = std::make_unique<std::shared_ptr<void>>(std::move(owner));
  set_memory(storage_of_view(view_),
             c10::DataPtr(given_, context.release(), &delete_owner, view_.device()));
  renew();
  take();
}

bool ParameterStorage::leave_copy() {
  forget_moved();
  const at::NoGradGuard no_grad;
  at::Tensor copy;
  try {
    copy = at::empty_like(view_);
    copy.copy_(view_);
  } catch (const c10::Error&) {  // how torch reports missing memory on the host
    return false;
  }
  c10::StorageImpl& made = storage_of_view(copy);
  set_memory(storage_of_view(view_), made.set_data_ptr(c10::DataPtr(nullptr, view_.device())));
  renew();
  take();
  return true;
}

std::size_t ParameterStorage::others(const at::Tensor& variable) const {
  const at::Tensor* const known[] = {&view_, &variable};
  std::size_t ours = pending_ != nullptr ? 1 : 0;
  std::size_t waits = pending_ != nullptr ? pending_.use_count() - 1 : 0;
  for (const at::Tensor* tensor : known) {
    const c10::StorageImpl* storage = tensor->storage().unsafeGetStorageImpl();
    if (storage == impl()) ++ours;
    if (pending_ != nullptr && storage == pending_.get()) --waits;
  }
  if (pending_view_.defined()) --waits;
  return view_.storage().use_count() - ours + waits;
}

bool ParameterStorage::moved() const {
  return storage_of_view(view_)._mutable_data_ptr_no_checks().get() != given_;
}

void ParameterStorage::forget_moved() {
  if (!moved()) return;
  renew();
  set_memory(storage_of_view(view_), c10::DataPtr(given_, view_.device()));
}

const at::Tensor& ParameterStorage::pending_view(const std::function<void()>& complete) {
  if (pending_ == nullptr) {
    pending_ = c10::make_intrusive<PendingStorage>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage_of_view(view_)), complete);
    pending_view_ = PendingStorage::view(pending_, view_);
  }
  pending_->set_nbytes(bytes());  // a copy must not find it empty
  return pending_view_;
}

void ParameterStorage::forget_pending() {
  if (pending_ != nullptr) pending_->forget();
}

// The old storage lives as long as tensors hold it.
void ParameterStorage::renew() {
  forget_pending();
  pending_view_.reset();
  pending_.reset();
  point(view_, make_view(view_.scalar_type(), view_.sizes(), view_.device()));
}

}  // namespace strata::torch
