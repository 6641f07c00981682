// Turns gradients, as autograd produces them, into reduced, accumulated gradient shards: orders the
// work of GradientArrivals, GradientWrites, ReductionsInFlight and GradientShards.
//
// If the graph differs from the last one, a gradient may come after its unit was reduced. It goes
// with the next reduction or at the step. A parameter without a gradient on this rank contributes
// zeroes. With several shard groups, micro-steps are added up inside each group, and over the
// groups in the last micro-step of a step.
//
// Threads: one thread at a time. Ownership: gradients are read during add(), or held by it.
// Errors: CommError, OutOfMemoryError, DeviceError; after a CommError the reducer is broken with
// its collectives.
#pragma once

#include <algorithm>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/reduce/gradient_arrivals.h"
#include "strata/engine/reduce/gradient_shards.h"
#include "strata/engine/reduce/gradient_writes.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

class Reducer;

// Reductions under way, with the flat gradient buffers that they read. Buffers are given back as
// soon as their bytes were read; results are folded into the gradient shards in the order of
// starts. Ownership: owns the works and their buffers. Errors: CommError of the reductions;
// DeviceError.
class ReductionsInFlight {
 public:
  ReductionsInFlight(GradientShards& shards, StepRecorder& recorder)
      : shards_(shards), recorder_(recorder) {}

  // `buffer`: the memory that the reduction reads; null: none of this rank's.
  void add(int unit, GradientBuffers::Lease buffer, std::unique_ptr<comm::Work> work,
           StepRecorder::Recording recording) {
    if (buffer != nullptr) held_ += Bytes(buffer->bytes().size());
    pending_.push_back({unit, std::move(buffer), std::move(work), std::move(recording)});
  }
  // Lets the collectives continue with the started reductions. Where ranks pull, peers would
  // otherwise wait for this rank's work until its next call.
  void progress() {
    if (!pending_.empty()) pending_.back().work->done();
  }
  // Finishes those that have ended.
  void finish_ended() {
    while (!pending_.empty() && pending_.front().work->done()) {
      free_buffer(pending_.front());
      finish_front();
    }
  }
  // From now on called with each unit whose reduction is finished; may be empty.
  void notify(std::function<void(int unit)> finished) { finished_ = std::move(finished); }
  // Waits until buffers hold at most `at_most`, and finishes the ended reductions.
  void free_buffers(Bytes at_most) {
    for (Pending& pending : pending_) {
      if (held_ <= at_most) break;
      free_buffer(pending);
    }
    while (!pending_.empty() && pending_.front().buffer == nullptr && pending_.front().work->done())
      finish_front();
  }
  // Finishes all reductions up to this unit's, if that is under way: its shard may be added to
  // then.
  void finish(int unit) {
    const auto last = std::find_if(pending_.rbegin(), pending_.rend(),
                                   [unit](const Pending& pending) { return pending.unit == unit; });
    for (auto left = pending_.rend() - last; left > 0; --left) {
      free_buffer(pending_.front());
      finish_front();
    }
  }
  void finish() {  // all
    free_buffers(Bytes());
    while (!pending_.empty()) finish_front();
  }
  // Waits for all, and drops their results and errors.
  void abandon() {
    for (Pending& pending : pending_) pending.work.reset();  // waits, drops its error
    pending_.clear();
    held_ = Bytes();
  }

 private:
  struct Pending {
    int unit = -1;
    GradientBuffers::Lease buffer;  // null: given back, while the result is on its way
    std::unique_ptr<comm::Work> work;
    StepRecorder::Recording recording;  // of `work`
  };
  void free_buffer(Pending& pending) {
    if (pending.buffer == nullptr) return;
    recorder_.measure(Activity::kReduceWait, pending.unit,
                      [&] { pending.work->wait_for_readers(); });
    held_ -= Bytes(pending.buffer->bytes().size());
    pending.buffer.reset();
  }
  void finish_front() {
    Pending& pending = pending_.front();
    recorder_.measure(Activity::kReduceWait, pending.unit, [&] { pending.work->wait(); });
    recorder_.end(pending.recording);
    const int unit = pending.unit;
    shards_.finish(unit);
    pending_.pop_front();
    if (finished_) finished_(unit);
  }

  GradientShards& shards_;
  StepRecorder& recorder_;
  std::deque<Pending> pending_;
  std::function<void(int unit)> finished_;
  Bytes held_;  // by buffers of pending_
};

// A script's edits, on this rank, to the gradients that a step has collected so far, reduced or
// not: it drops all of them or those of one parameter, or puts others in their place. The step then
// updates with the gradients that are left. No edit waits for other ranks. If a rank drops reduced
// gradients, all others have to drop the same ones: the next step checks that
// (GradientRecord::dropped()). Between backward passes. Errors: OutOfMemoryError, DeviceError.
class GradientEdits {
 public:
  explicit GradientEdits(Reducer& reducer) : reducer_(reducer) {}

  // Nothing was collected: costs nothing.
  void drop_all();
  // `came`: it still counts as one that got a gradient, of zeroes.
  void drop(int unit, int slot, bool came);
  // Sets this rank's part of the parameter's gradient to these fp32 values; null if this rank owns
  // no part. The compute stream reads the values.
  void store(int unit, int slot, const float* values);

 private:
  void write(int unit, int slot, const float* values);

  Reducer& reducer_;
};

// The use of a backward pass's gradients.
enum class BackwardPass {
  kKeeps,    // they stay on this rank, whole, for a later pass
  kReduces,  // they are reduced; another pass of this step follows
  kLast,     // they are reduced, and the step follows
};

class Reducer {
 public:
  // `scopes`: of the model.
  Reducer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
          StepRecorder& recorder, const EngineOptions& options,
          std::span<const plan::ScopeSpec> scopes);

  // This parameter, which was frozen, gets gradients from the next pass on; its unit is trainable.
  // Collective between passes, after a barrier.
  void expect(int unit, int slot) {
    writes_.add(unit);
    arrivals_.expect(unit, static_cast<std::size_t>(slot), writes_.largest() + max_reducing_);
  }

  // A backward pass starts. `first_uses`: the units in the order in which forward first used them.
  // The first pass reduces in the reverse of that order, as rank 0 has it. `summed` is called, in
  // this pass, when the sum of a unit is complete all of whose parameters have gradients here.
  void begin_backward(BackwardPass pass, std::span<const int> first_uses,
                      std::function<void(int unit)> summed = {});
  // One gradient of one parameter: contiguous, with the parameter's number of elements. `owner`
  // keeps its memory; null: it is read in the order of the compute stream, before this returns.
  void add(int unit, int slot, const std::byte* gradient, DType dtype,
           std::shared_ptr<const void> owner);
  // Instead of add(), for a tile: the compute stream computes its gradient into the place of
  // begin_add(), before end_add(). Only gathers may be called in between.
  GradientTarget begin_add(int unit, int slot);
  void end_add(int unit, int slot) {
    writes_.wrote(unit, slot);
    record_written(unit, static_cast<std::size_t>(slot));
  }
  // Reduces the remaining gradients and waits for all. The shards are up to date afterwards.
  void end_backward();
  // A backward pass failed: drops all gradients. Returns the first error on the way, or null.
  std::exception_ptr abandon_backward() noexcept;
  // Forgets the gradients of the step so far, and the parameters that had none. Between passes.
  void drop_gradients() {
    writes_.drop();
    forget_step();
  }

  // Both since the last drop_gradients().
  const GradientRecord& record() const { return record_; }
  GradientEdits& edits() { return edits_; }
  // Trainable parameters that have elements and got no gradient on this rank in any backward pass
  // since the last drop_gradients(), in ascending order.
  std::vector<int> params_without_gradient() const;

  // Units that hold gradients which came too late for their reduction.
  std::vector<int> late_units() const;
  // Collective: reduces those of all ranks once more; ranks without late gradients contribute
  // zeroes.
  void reduce_late();

  // Collective, before a step: adds up over the groups all shards that no last pass has added up.
  void complete_groups();

  // Between passes, after a barrier: GradientShards::offload_states() and GradientWrites'. Until
  // reload_states() only drop_gradients() may be called.
  void offload_states(bool shards, bool buffers, bool pinned);
  void reload_states() {
    writes_.reload_states();
    shards_.reload_states();
  }

  GradientShards& shards() { return shards_; }
  // Throws UsageError if units are updated before the step.
  void require_none_early() const {
    for (const Unit& unit : units_) unit.require_not_early();
  }

 private:
  friend class GradientEdits;
  void forget_step() {
    for (Unit& unit : units_) unit.early = false;
    shards_.clear();
    std::fill(of_group_.begin(), of_group_.end(), false);
    record_.forget();
  }
  void start_reduction(int unit);
  comm::Replicas replicas_of(int unit);
  // Reductions end here, and not where the next one starts: until another buffer is needed they may
  // take their time.
  void open_buffer(int unit) {
    if (writes_.has_buffer(unit)) return;
    in_flight_.free_buffers(std::max(max_reducing_ - writes_.bytes(unit), Bytes()));
    writes_.open_buffer(unit);
  }
  void record_written(int unit, std::size_t slot) {
    in_flight_.progress();
    if (summed_) in_flight_.finish_ended();
    if (!arrivals_.record(unit, slot, writes_.bytes(unit)) || pass_ == BackwardPass::kKeeps) return;
    while (const std::optional<int> ready = arrivals_.next_ready()) start_reduction(*ready);
  }
  const plan::Slot& slot(int unit, int index) const {
    return nth(nth(units_, unit).layout.slots(), index);
  }
  // Whether the unit's gradients may be pushed. A tile's gradients are written where its reduction
  // reads them, and a tied tile would occur twice in a pass.
  bool is_pushed(int unit) const { return !nth(units_, unit).spec.tile(); }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
  StepRecorder& recorder_;
  const EngineOptions& options_;
  Bytes largest_scope_;
  Bytes max_reducing_;  // of buffers under reduction; about as much of complete ones may wait
  bool measures_;       // the squares of reduced gradients, in the last pass of a step
  GradientBuffers buffers_;
  GradientShards shards_;
  GradientWrites writes_;
  GradientArrivals arrivals_;
  ReductionsInFlight in_flight_;
  BackwardPass pass_ = BackwardPass::kLast;
  bool summed_ = false;         // someone waits for sums
  bool adds_up_later_;          // over several groups, in the last pass of a step
  std::vector<bool> of_group_;  // by unit: its shard holds what no other group has added to
  GradientRecord record_;
  GradientEdits edits_{*this};
};

}  // namespace strata::engine
