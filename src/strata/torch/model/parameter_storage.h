// The torch storage behind one parameter under the engine. It has exactly the parameter's bytes, so
// torch.save() writes the parameter alone.
//
// The engine gives it memory (give()) and takes it away (take()). Views of the parameter that
// autograd saved are valid again after the next give(), at whatever address. Reading a view without
// memory is torch's RuntimeError, never a read of freed memory. If a script holds views whose
// values must stay, the storage goes to them with its memory (leave()) or with a copy
// (leave_copy()), and the parameter gets a new storage.
//
// Threads: one thread at a time. Ownership: the engine owns the memory until leave(); the owner
// that is passed to leave() lives as long as the views.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "strata/plan/flat_layout.h"
#include "strata/torch/model/pending_storage.h"

namespace strata::torch {

class ParameterStorage {
 public:
  // `offset`: the parameter's offset in its unit's flat buffer, in elements.
  ParameterStorage(const plan::ParamSpec& spec, Numel offset, c10::Device place);

  // A tensor of the parameter's full shape and memory format, always the same object.
  const at::Tensor& view() const { return view_; }
  const c10::StorageImpl* impl() const { return view_.storage().unsafeGetStorageImpl(); }

  void give(std::byte* flat);  // the unit's flat buffer
  void take();
  // Hands the storage to the views. leave() hands it over with its memory, which `owner` keeps;
  // leave_copy() with a copy. leave_copy() returns false if there was no memory for a copy; then
  // nothing has changed.
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
