// The torch storage behind one parameter under the engine. It has exactly the parameter's bytes, so
// torch.save() writes the parameter alone. The engine gives it memory and takes it away: views of
// the parameter that autograd saved (weight.t() and the like) are valid again after the next
// give(), at whatever address. Reading a view without memory is torch's RuntimeError, never a read
// of freed memory. If a script holds views whose values must stay, the storage goes to them
// (leave()), and the parameter gets a new one.
//
// Threads: one thread at a time. Ownership: the engine owns the memory until leave(); the owner
// that is passed to leave() lives as long as the views.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "strata/plan/param_spec.h"

namespace strata::torch {

// The storage of pending parameters, whose new values have not all arrived in the memory behind
// them: during their unit's lazy all-gather. Every operator of torch that gets such a tensor, or
// p.data taken meanwhile, first waits for the values (complete()) and then runs. So a script that
// reads a parameter between a step and the next forward sees the same values as if the step had
// waited. Asking for the address without any operator (data_ptr(), storage().cpu()) is torch's
// RuntimeError, with a message that says how to read the values.
//
// A gradient that a parameter shows (ParameterGradients) gets its values in the same way when an
// operator first reads it. Its complete() may throw, and then the operator throws.
//
// The mechanism is a dispatch key that torch reserves for other libraries (DeferredInit): this
// class registers a fallback for it once per process. Threads: any may read; complete() runs in the
// thread of the operator, in one thread at a time for one storage, with or without Python's lock,
// which it must not ask for. Ownership: tensors own their storage, which may outlive the engine;
// the engine calls forget() before it goes.
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

  // Waits for the values. Then points the tensor at them unless the engine has already done so, as
  // it does for parameters.
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

class ParameterStorage {
 public:
  // `offset`: the parameter's offset in its unit's flat buffer, in elements.
  ParameterStorage(const plan::ParamSpec& spec, Numel offset, c10::Device place);

  // A tensor of the parameter's full shape and memory format, always the same object.
  const at::Tensor& view() const { return view_; }
  const c10::StorageImpl* impl() const { return view_.storage().unsafeGetStorageImpl(); }

  void give(std::byte* flat);  // the unit's flat buffer
  void take();
  // Hands the storage to the views: with its memory, which `owner` keeps, or with a copy. False if
  // there is no memory for a copy; then nothing has changed.
  void leave(std::shared_ptr<void> owner);
  bool leave_copy();
  // The number of tensors with this storage that are neither view() nor `variable`.
  std::size_t others(const at::Tensor& variable) const;
  // Whether a script has moved the values elsewhere, as share_memory_() does. forget_moved() leaves
  // them there and makes view() a view of the engine's memory again.
  bool moved() const;
  void forget_moved();

  // The parameter's view of the storage that waits for values. Both are made at the first call.
  const at::Tensor& pending_view(const std::function<void()>& complete);
  const PendingStorage* awaited() const { return pending_.get(); }
  void forget_pending();

 private:
  void renew();
  std::size_t bytes() const { return view_.nbytes(); }

  Numel offset_;
  at::Tensor view_;
  std::byte* given_ = nullptr;                       // null: no memory
  c10::intrusive_ptr<PendingStorage> pending_ = {};  // null: it never was
  at::Tensor pending_view_;
};

// Does the same as set_data() for tensors of one dtype and device. set_data() is an operator, so it
// would wait for pending values.
void point(const at::Tensor& variable, const at::Tensor& view);

}  // namespace strata::torch
