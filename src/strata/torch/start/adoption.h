// Takes the values of a live model's parameters into the engine's shards. Threads: one, and those
// that read values on the host. Errors: CommError, OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/engine/engine.h"
#include "strata/plan/init_plan.h"
#include "strata/torch/model/model_plan.h"

namespace strata::torch {

// The values that a model's parameters had before the engine took them. A start that fails puts
// them back. Parameters keep their memory until the engine points them at its own, or until
// give_up(). Threads: one. Ownership: shares the values' memory; the parameters are the user's.
class OriginalValues {
 public:
  // `specs`: of the parameters.
  OriginalValues(const std::vector<ModelParameter>& parameters,
                 std::span<const plan::ParamSpec> specs);

  int size() const { return static_cast<int>(params_.size()); }
  // The parameter's values, as a view whose dimensions are in the order of its slot: [N, H, W, C]
  // of a channels_last parameter. Undefined if it has none of its own or they were given up.
  const at::Tensor& of(int param) const { return engine::nth(params_, param).values; }
  // Takes `values`, a copy of of(param) at another place. Frees the old memory; the parameter
  // points at the copy.
  void move(int param, at::Tensor values);
  // Frees the memory of the values for good; the parameter is empty.
  void give_up(int param);
  // The number of parameters whose values were given up.
  int given_up() const { return given_up_; }
  // Drops all values, when nothing can fail any more and the parameters have other memory. Returns
  // the tensors on the host that no other owner shares: the system takes long to free them, so
  // another thread can do it (free()), for which a thread with Python's lock must not wait.
  std::vector<at::Tensor> release();
  // Gives every parameter its values again, at their old place if there is still room. Those that
  // were given up are empty.
  void restore() noexcept;

 private:
  struct Param {
    at::Tensor variable;
    at::Tensor values;
    c10::Device home;
    bool channels_last;
    bool gone = false;
    void point_at(const at::Tensor& tensor) { variable.set_data(tensor); }
  };
  std::vector<Param> params_;
  int given_up_ = 0;
};

// Frees the result of release(). The order and the size of the pieces let other threads map memory
// meanwhile.
void free(std::vector<at::Tensor> values) noexcept;

// The dtype of each parameter's values, if it has some. It must be equal on all ranks, or they
// bring different models. For engine::agree_on_text, before adopt_values().
std::string describe_values(const std::vector<ModelParameter>& parameters);

// Collective. Rank 0's values win: the other ranks read them in rank 0's memory (lending.h), or
// ranks compare fingerprints of blocks and rank 0 sends the blocks that differ on any rank. Values
// may lie on the host or on the engine's device, `place`, contiguous or not; parameters without
// values are skipped. `tier` is the order in which memory is taken and given back
// (plan/init_plan.h): if the engine's memory does not fit beside the values, `originals` are given
// up as it grows; else the caller releases or restores them. Parameters that other models have
// sharded come in pieces of `piece` bytes, and those models retire. Returns whether units that stay
// whole have been written whole on every rank.
bool adopt_values(engine::Engine& engine, c10::Device place,
                  const std::vector<ModelParameter>& parameters, plan::InitTier tier,
                  ThreadPool& threads, OriginalValues& originals, Bytes piece);

}  // namespace strata::torch
