// The storage of parameters whose new values are still on their way to the memory behind them.
//
// While a unit's weights are being refreshed beside the model's next forward, its parameters lie in
// an AwaitedStorage. Every operator of torch that gets such a tensor first asks for the values
// (complete()) and then runs as ever, so a script that reads a parameter between a step and the
// next forward sees what it would have seen had the step waited. That holds for p.data as well,
// taken while it waits. Asking for the address itself (data_ptr(), storage().cpu()) without any
// operator is torch's RuntimeError, with a message that says what to do.
//
// What else comes to its values only when somebody asks for them lies in one, too: the gradient
// that a parameter shows (ParameterGradients). Its complete() may throw; the operator does then.
//
// It works by a dispatch key that torch leaves to others (DeferredInit): a fallback for it is
// registered once a process. Threads: any may read; complete() runs in the thread of the operator,
// one at a time for one storage, with or without Python's lock, which it must not ask for.
// Ownership: tensors own their storage, which may outlive the engine: forget() then.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <mutex>
#include <utility>

namespace strata::torch {

class AwaitedStorage final : public c10::StorageImpl {
 public:
  // False where somebody else has taken the key: values cannot be awaited in this process.
  static bool available();

  // `values`: what complete() fills. `complete`: returns when the current stream's later work will
  // find the values there.
  // `no_address`: the message to who asks for the address alone; null: that of parameters.
  AwaitedStorage(c10::intrusive_ptr<c10::StorageImpl> values, std::function<void()> complete,
                 const char* no_address = nullptr);
  // Called in place of zero_() on a tensor that is not settled. False: it runs as other operators.
  void on_zero(std::function<bool()> zeroed) { zeroed_ = std::move(zeroed); }
  bool zero() const { return zeroed_ && zeroed_(); }

  // What `view`, a tensor of the values, will be: of its shape and place, awaited.
  static at::Tensor view(const c10::intrusive_ptr<AwaitedStorage>& storage, const at::Tensor& view);

  // Asks for the values, and points the tensor at them where that was not done with the
  // parameter's: a tensor object that was made of a parameter meanwhile (p.data).
  void settle(const at::Tensor& tensor);
  // Nobody fills the values any more; what still waits sees them as they are, or `instead` is
  // called, to throw. Returns when no thread is asking for them.
  void forget(std::function<void()> instead = nullptr);
  const c10::intrusive_ptr<c10::StorageImpl>& values() const { return values_; }

 private:
  c10::intrusive_ptr<c10::StorageImpl> values_;
  std::mutex mutex_;  // guards complete_, and tensors that are being pointed at values_
  std::function<void()> complete_;
  std::function<bool()> zeroed_;
};

}  // namespace strata::torch
