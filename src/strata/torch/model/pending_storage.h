// The storage of pending parameters: their new values have not all arrived in the memory behind
// them.
//
// During a unit's lazy all-gather, beside the model's next forward, its parameters lie in an
// PendingStorage. Every operator of torch that gets such a tensor first waits for the values
// (complete()) and then runs. So a script that reads a parameter between a step and the next
// forward sees the same values as if the step had waited. That holds for p.data as well, if the
// script took it meanwhile. Asking for the address without any operator (data_ptr(),
// storage().cpu()) is torch's RuntimeError, with a message that says how to read the values.
//
// A gradient that a parameter shows (ParameterGradients) lies in such a storage as well: it gets
// its values when an operator first reads it. Its complete() may throw, and then the operator
// throws.
//
// The mechanism is a dispatch key that torch reserves for other libraries (DeferredInit): this
// class registers a fallback for it once per process. Threads: any may read; complete() runs in the
// thread of the operator, in one thread at a time for one storage, with or without Python's lock,
// which it must not ask for. Ownership: tensors own their storage, which may outlive the engine;
// the engine calls forget() before it goes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <mutex>
#include <utility>

namespace strata::torch {

class PendingStorage final : public c10::StorageImpl {
 public:
  // False if another library has taken the key; then this process cannot have pending parameters.
  static bool available();

  // `values`: the memory that complete() fills. `complete`: returns when later work on the current
  // stream will find the values there. `no_address`: the message of the error for a caller that
  // asks for the address; null: the message for parameters.
  PendingStorage(c10::intrusive_ptr<c10::StorageImpl> values, std::function<void()> complete,
                 const char* no_address = nullptr);
  // Sets a function that is called in place of zero_() on a tensor that is not settled. If it
  // returns false, zero_() runs as other operators do.
  void on_zero(std::function<bool()> zeroed) { zeroed_ = std::move(zeroed); }
  bool zero() const { return zeroed_ && zeroed_(); }

  // A pending tensor in `storage` with the shape and offset of `view`, which is a tensor of the
  // values.
  static at::Tensor view(const c10::intrusive_ptr<PendingStorage>& storage, const at::Tensor& view);

  // Waits for the values. Then points the tensor at them unless the engine has already done so; it
  // has for parameters, but not for a tensor object that the script made of one meanwhile (p.data).
  void settle(const at::Tensor& tensor);
  // Drops the call of complete(): tensors that still wait see the present bytes. With `instead`,
  // that is called, and throws. Returns when no thread is within complete().
  void forget(std::function<void()> instead = nullptr);
  const c10::intrusive_ptr<c10::StorageImpl>& values() const { return values_; }

 private:
  c10::intrusive_ptr<c10::StorageImpl> values_;
  std::mutex mutex_;  // guards complete_, and tensors that are being pointed at values_
  std::function<void()> complete_;
  std::function<bool()> zeroed_;
};

}  // namespace strata::torch
