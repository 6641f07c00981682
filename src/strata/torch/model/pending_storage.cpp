#include "strata/torch/model/pending_storage.h"

#include <ATen/core/stack.h>
#include <torch/library.h>

#include <thread>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

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
  if (storage == nullptr) {
    throw UsageError(
        "an operator got a tensor with the dispatch key DeferredInit that is not one of Strata's; "
        "set strata.refresh_at to \"step\" where another library uses that key");
  }
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
