#include "strata/torch/model/parameter_storage.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <thread>

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

at::Tensor make_view(at::ScalarType scalar, c10::IntArrayRef shape, c10::IntArrayRef strides,
                     c10::Device place) {
  const auto storage = bare_storage(
      place, at::detail::computeStorageNbytesContiguous(shape, c10::elementSize(scalar)));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(kReleased);
  return tensor_in(storage, scalar, shape, strides);
}

c10::StorageImpl& storage_of_view(const at::Tensor& view) {
  return *view.storage().unsafeGetStorageImpl();
}

void set_memory(c10::StorageImpl& storage, c10::DataPtr memory) {
  c10::unreadable(storage) = memory.get() == nullptr;
  storage.set_data_ptr_noswap(std::move(memory));
}

constexpr c10::DispatchKey kPending = c10::DispatchKey::DeferredInit;

constexpr const char* kNoAddress =
    "the address of a parameter was asked for between step() and the next forward, while its new "
    "values are still on their way; read it with an operator of torch first (p.detach() or "
    "p.clone(), say), which waits for them, or set strata.refresh_at to \"step\"";

// A tensor of the same shape and offset in another storage. Made without set_(), whose bounds check
// would need memory.
at::Tensor make_like(const c10::TensorImpl& like,
                     const c10::intrusive_ptr<c10::StorageImpl>& storage,
                     c10::DispatchKeySet keys) {
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                    like.storage_offset());
  return made;
}

// The tensor's storage if its values are pending, else null.
PendingStorage* awaited(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kPending)) return nullptr;
  const auto find = [&] {
    return dynamic_cast<PendingStorage*>(tensor.storage().unsafeGetStorageImpl());
  };
  PendingStorage* storage = find();
  // Another thread may be pointing the tensor at its values: the storage changes before the key.
  for (int turn = 0; storage == nullptr && turn < 1000; ++turn) {
    std::this_thread::yield();
    if (!tensor.key_set().has(kPending)) return nullptr;
    storage = find();
  }
  if (storage == nullptr)
    throw UsageError(
        "an operator got a tensor with the dispatch key DeferredInit that is not one of Strata's; "
        "set strata.refresh_at to \"step\" where another library uses that key");
  return storage;
}

void settle(const at::Tensor& tensor) {
  PendingStorage* found = awaited(tensor);
  if (found == nullptr) return;
  c10::intrusive_ptr<PendingStorage>::reclaim_copy(found)->settle(tensor);
}

void settle(const c10::IValue& value) {
  if (value.isTensor()) {
    settle(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) settle(tensor);
  } else if (value.isList()) {  // of optional tensors, or without tensors
    for (const c10::IValue& element : value.toListRef()) settle(element);
  }
}

// zero_() returns its argument, which is on the stack already.
bool zeroed(const c10::OperatorHandle& op, const ::torch::jit::Stack& stack) {
  if (op.operator_name().name != "aten::zero_" || !stack.back().isTensor()) return false;
  const PendingStorage* const found = awaited(stack.back().toTensor());
  return found != nullptr && found->zero();
}

void settle_and_run(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                    ::torch::jit::Stack* stack) {
  if (zeroed(op, *stack)) return;
  for (const c10::IValue& value : ::torch::jit::last(*stack, op.schema().arguments().size()))
    settle(value);
  op.callBoxed(stack);
}

}  // namespace

void point(const at::Tensor& variable, const at::Tensor& view) {
  variable.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
}

ParameterStorage::ParameterStorage(const plan::ParamSpec& spec, Numel offset, c10::Device place)
    : offset_(offset),
      view_(make_view(to_scalar_type(spec.dtype), spec.shape,
                      dense_strides(spec.shape, spec.channels_last), place)) {}

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
  set_memory(storage_of_view(view_),
             c10::InefficientStdFunctionContext::makeDataPtr(
                 given_, [owner = std::move(owner)](void*) {}, view_.device()));
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
  const c10::InferenceMode off(false);  // autograd cannot save a view that is made in this mode
  point(view_, make_view(view_.scalar_type(), view_.sizes(), view_.strides(), view_.device()));
}

bool PendingStorage::available() {
  // Torch keeps one fallback a key for the whole process.
  static const bool registered = [] {
    try {
      static ::torch::Library library(::torch::Library::IMPL, "_", kPending, __FILE__, __LINE__);
      library.fallback(::torch::CppFunction::makeFromBoxedFunction<&settle_and_run>());
      return true;
    } catch (const c10::Error&) {
      return false;  // another library has registered one
    }
  }();
  return registered;
}

PendingStorage::PendingStorage(c10::intrusive_ptr<c10::StorageImpl> values,
                               std::function<void()> complete, const char* no_address)
    : c10::StorageImpl(use_byte_size_t(), c10::SymInt(0), c10::DataPtr(nullptr, values->device()),
                       nullptr, /*resizable=*/false),
      values_(std::move(values)),
      complete_(std::move(complete)) {
  release_data_and_set_meta_custom_data_ptr_error_msg_(no_address != nullptr ? no_address
                                                                             : kNoAddress);
}

at::Tensor PendingStorage::view(const c10::intrusive_ptr<PendingStorage>& storage,
                                const at::Tensor& view) {
  const c10::TensorImpl* like = view.unsafeGetTensorImpl();
  return make_like(*like, storage, like->key_set().add(kPending));
}

void PendingStorage::settle(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (complete_) complete_();
  if (awaited(tensor) != this) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const at::Tensor twin = make_like(*impl, values_, impl->key_set().remove(kPending));
  impl->shallow_copy_from(twin.getIntrusivePtr());
}

void PendingStorage::forget(std::function<void()> instead) {
  const std::lock_guard lock(mutex_);
  complete_ = std::move(instead);
  zeroed_ = nullptr;
}

}  // namespace strata::torch
