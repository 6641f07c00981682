// Takes gradients as autograd produces them and turns them into reduced, accumulated fp32 gradient
// shards.
//
// A parameter's gradient is written once, converted to the buffer's dtype, at its place in its
// unit's flat gradient buffer. That dtype is the reduce dtype; or the unit's own, half the bytes,
// where nothing is lost: gradients of 16 bits that are not kept for a later pass, and collectives
// that add them up in fp32. When every expected gradient of a unit has arrived the unit is
// complete; units are reduced in one order that all ranks share, each as soon as it and its
// predecessors are complete, so that the collectives match whatever each rank's autograd did. The
// order and the number of gradients to expect are learned from the first pass. A gradient that
// comes after its unit was reduced (a graph that differs from the last one) is kept, and goes out
// with the next reduction or at the step. A parameter that got no gradient on this rank contributes
// zeroes. Others do not wait for it with more than `max_reducing` bytes and a unit: then the unit
// in front is reduced as it is.
//
// Where there are several shard groups, micro-steps are added up inside each, and over the groups
// in the last one of a step.
//
// Where ranks write into each other's memory (comm/inbox.h), a gradient goes straight to the ranks
// that add it up instead, and the flat buffer is for those that cannot: the sum of several, those
// of passes that do not reduce, and what comes late.
//
// On a device that runs ahead, gradients are written to their buffers beside the model's kernels,
// on the stream of the collectives, or one of the reducer's own; a few are kept alive until that is
// done.
//
// Threads: one thread at a time. Ownership: gradients are read during add(), or kept by it.
// Errors: CommError; after one the reducer is broken with its collectives.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/reduce/gradient_buffers.h"
#include "strata/engine/reduce/gradient_inbox.h"
#include "strata/engine/reduce/gradient_shards.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

struct ReducerOptions {
  std::string name;  // of the engine
  DType reduce_dtype = DType::kFloat32;
  DType accumulation_dtype = DType::kFloat32;
  Bytes max_reducing;     // of buffers under reduction; about as much of complete ones may wait
  bool sum = false;       // over ranks; else the mean
  bool measures = false;  // the squares of reduced gradients, in the last pass of a step
  Bytes max_kept{};       // of gradients that wait to be written; the newest may exceed it
};

class Reducer {
 public:
  Reducer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
          StepRecorder& recorder, ReducerOptions options);
  ~Reducer();

  // A backward pass starts. `reduce`: its gradients are reduced now (else they wait, whole, for a
  // later pass). `first_uses`: the units in the order in which forward first used them; taken as
  // the reduction order, reversed, the first time (rank 0's counts). `last`: the step follows.
  void begin_backward(bool reduce, std::span<const int> first_uses, bool last = true);
  // One gradient of one parameter: contiguous, the parameter's number of elements. `keep`: what
  // owns it; null: it is read in the order of the compute stream, before this returns.
  void add(int unit, int slot, const std::byte* gradient, DType dtype,
           std::shared_ptr<const void> keep);
  // Reduces what is left and waits for all. The shards are up to date afterwards.
  void end_backward();
  // A backward pass failed: what it left behind is dropped, so that the next one starts clean.
  void abandon_backward();
  // Forgets the gradients of the step so far, reduced or not. Not during a backward pass.
  void drop_gradients();

  // A parameter that got no gradient on this rank since the last clear_unused(); -1: none.
  int unused_param() const { return unused_param_; }
  void clear_unused() { unused_param_ = -1; }

  // Units that hold gradients which came too late for their reduction.
  std::vector<int> late_units() const;
  // Collective: reduces the given units once more; ranks without late gradients contribute zeroes.
  void reduce_late(std::span<const int> units);

  // Collective, before a step: adds up over the groups what no last pass did.
  void complete_groups();

  GradientShards& shards() { return shards_; }

 private:
  struct Pending {
    int unit = -1;
    GradientBuffers::Buffer buffer;  // null: given back, while the result is on its way
    std::unique_ptr<comm::Work> work;
    StepRecorder::Recording recording;  // of `work`
  };
  struct Progress {
    std::vector<int> expected;  // gradients by slot in one pass, as learned
    std::vector<int> seen;      // in this pass
    std::vector<bool> written;  // slots of the buffer that hold something
    int missing = 0;            // gradients that are expected and have not come
    bool waiting = false;       // complete, and not its turn yet
    bool reduced = false;       // in this pass
    GradientBuffers::Buffer buffer;
  };

  DType buffer_dtype(int unit) const;
  void keep_for_later_passes();
  void open(int unit);
  void begin_pushes();
  bool push(int unit, int slot, const std::byte* gradient, DType dtype);
  void keep_until_written(std::shared_ptr<const void> keep, Bytes bytes);
  void fill_what_is_missing(int unit);
  void push_what_is_missing(int unit);
  void zero_padding(int unit, std::span<float> shard);
  void note_unused(int unit, std::size_t slot);
  device::Stream& writes();
  // Later writes come after what the compute stream holds now; and the other way round.
  void writes_follow_compute();
  void compute_follows_writes();
  void let_go(Bytes most);
  void try_reduce();
  void start_reduction(int unit);
  comm::Replicas replicas_of(int unit);
  // Until buffers under reduction hold no more than this; and with what has become complete.
  void free_buffers(Bytes at_most);
  void settle(Pending& pending);
  void finish_reductions();
  void agree_on_order(std::vector<int> order);
  void learn();
  Bytes buffer_bytes(int unit) const {
    return bytes_of(units_[static_cast<std::size_t>(unit)].layout.padded(), buffer_dtype(unit));
  }
  Progress& progress(int unit) { return progress_[static_cast<std::size_t>(unit)]; }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
  StepRecorder& recorder_;
  ReducerOptions options_;
  GradientBuffers buffers_;
  GradientInbox inbox_;
  GradientShards shards_;
  std::vector<Progress> progress_;  // by unit; of frozen units unused
  std::vector<int> order_;       // trainable units in the order of reduction, the same on all ranks
  std::vector<int> completion_;  // order of completion in this pass
  std::size_t next_ = 0;         // index into order_ of the next unit to reduce
  std::unique_ptr<device::Stream> own_writes_;  // null: the collectives have one, or none is needed
  device::Stream* writes_ = nullptr;            // null: the compute stream
  bool written_ = false;  // something the compute stream was not told to wait for
  struct Kept {
    std::shared_ptr<const void> gradient;
    Bytes bytes;
    std::unique_ptr<device::Event> written;
  };
  std::deque<Kept> kept_gradients_;
  Bytes kept_bytes_;
  std::deque<Pending> pending_;
  Bytes pending_bytes_;
  Bytes waiting_bytes_;  // of complete units that are not reduced yet, in this pass
  Bytes waiting_max_;
  bool reducing_ = false;       // this pass reduces
  bool last_ = true;            // and the step follows
  bool adds_up_later_;          // over several groups, in the last pass of a step
  std::vector<bool> of_group_;  // by unit: its shard holds what no other group has added to
  bool kept_ = false;  // gradients of earlier passes are in the buffers, on some rank at least
  int unused_param_ = -1;
  int passes_ = 0;  // passes that reduced
};

}  // namespace strata::engine
