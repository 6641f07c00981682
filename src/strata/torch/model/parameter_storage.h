// The torch storage behind one parameter under the engine, as long as it is wide: exactly the
// parameter's bytes, so what torch.save() writes of it is the parameter alone.
//
// The engine gives it memory (give()) and takes it away (take()). Views that autograd saved of the
// parameter stay valid at the next give(), at whatever address. Reading one without memory is
// torch's RuntimeError, never a read of memory that is gone. Where a script holds views whose
// values have to stay, the storage goes to them with its memory (leave()) or with a copy
// (leave_copy()), and the parameter gets a new one.
//
// Threads: one thread at a time. Ownership: the memory is the engine's until leave(); the owner
// that comes with it lives as long as the views.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "strata/plan/flat_layout.h"
#include "strata/torch/model/awaited_storage.h"

namespace strata::torch {

class ParameterStorage {
 public:
  // `offset`: of the parameter in its unit's flat buffer, in elements.
  ParameterStorage(const plan::ParamSpec& spec, Numel offset, c10::Device place);

  // Of the parameter's full shape. The tensor object stays the same.
  const at::Tensor& view() const { return view_; }
  const c10::StorageImpl* impl() const { return view_.storage().unsafeGetStorageImpl(); }

  void give(std::byte* flat);  // the unit's flat buffer
  void take();
  // What the views are of becomes theirs: the memory, which `owner` keeps, or a copy of it. False:
  // there was no memory for a copy, and nothing has changed.
  void leave(std::shared_ptr<void> owner);
  bool leave_copy();
  // Tensors that are neither view() nor `variable` and have this storage.
  std::size_t others(const at::Tensor& variable) const;
  // Whether a script has moved the values elsewhere, as share_memory_() does. forget_moved() lets
  // it keep them there; view() is of the engine's memory again.
  bool moved() const;
  void forget_moved();

  // The storage that waits for values, and the parameter's view of it; made when first asked for.
  const at::Tensor& awaited_view(const std::function<void()>& complete);
  const AwaitedStorage* awaited() const { return awaited_.get(); }
  void forget_awaited();

 private:
  void renew();
  std::size_t bytes() const { return view_.nbytes(); }

  Numel offset_;
  at::Tensor view_;
  std::byte* given_ = nullptr;                       // null: no memory
  c10::intrusive_ptr<AwaitedStorage> awaited_ = {};  // null: it never was
  at::Tensor awaited_view_;
};

// What set_data() does to tensors of one dtype and device. It is an operator, which would ask for
// values that are awaited.
void point(const at::Tensor& variable, const at::Tensor& view);

}  // namespace strata::torch
