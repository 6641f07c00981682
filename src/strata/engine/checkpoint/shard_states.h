// The training state of this rank's shards, by kinds, element by element, in any form and tier:
// values (masters if there are some, else weights) and the optimizer's states.
//
// Kinds. format::kValue: fp32 where the unit has fp32 masters beside 16-bit weights, else the
// weights' own dtype: an fp64 weight holds all that its fp32 master has. The names of the
// optimizer's states ("exp_avg", ...): as the engine's own optimizer keeps them, of trainable
// units, from its first preparation on. States in 8 bits have their codes there, and under
// "exp_avg.scales" their scales: one for each 256 elements (format::elements_each()), which count
// as such here.
//
// Threads: the engine's. Ownership: borrows the engine. Errors: those of the StateStore.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/engine/optimize/native_optimizer.h"
#include "strata/format/manifest.h"

namespace strata::engine {

class ShardStates {
 public:
  explicit ShardStates(Engine& engine);
  // Waits for the device.
  ~ShardStates();

  // The kinds that a unit has; kValue first.
  std::vector<std::string_view> kinds_of(int unit) const {
    if (native_ == nullptr || !native_->states().prepared()) return {format::kValue};
    return storable_kinds_of(unit);
  }
  // The same, as if the optimizer were prepared: what loading can store.
  std::vector<std::string_view> storable_kinds_of(int unit) const {
    std::vector<std::string_view> kinds{format::kValue};
    if (native_ == nullptr || !nth(engine_.weights().units(), unit).trainable()) return kinds;
    for (const std::string_view state : native_->states().names(unit)) {
      kinds.push_back(state);
      if (in_8_bits(unit)) kinds.push_back(scales_of(state));
    }
    return kinds;
  }
  DType dtype_of(int unit, std::string_view kind) const;
  // Whether a unit's states have 8 bits, and the kind of a state's scales.
  bool in_8_bits(int unit) const { return native_ != nullptr && native_->states().in_8_bits(unit); }
  static std::string_view scales_of(std::string_view state);
  // The block of a state, or of scales.
  StateBlock block_of(int unit, std::string_view kind) const;

  // Queues on the compute stream: elements [first, first + numel) of the unit's shard to `target`,
  // host memory for transfers that stays until the stream has come so far.
  void enqueue_read(int unit, std::string_view kind, Numel first, Numel numel,
                    std::span<std::byte> target);
  // Queues a store of elements of a parameter, in any dtype. Elements that this rank does not own
  // are ignored. With kValue the masters follow. The optimizer must have been prepared.
  void enqueue_store(int param, std::string_view kind, Numel begin, Numel numel,
                     const std::byte* source, DType source_dtype);
  // Waits for what is queued.
  void settle();

 private:
  void through_scratch(
      Numel numel, DType dtype,
      const std::function<void(Numel done, Numel part, std::span<std::byte> scratch)>& queue);
  void fill_last_block(const Unit& unit, const StateBlock& block, Numel end);
  void read_masters(const Unit& unit, Numel first, Numel numel, std::span<std::byte> target);
  void write(std::byte* target, DType dtype, const std::byte* source, DType source_dtype,
             Numel count);

  Engine& engine_;
  NativeOptimizer* native_;                  // null: another optimizer, or none
  std::unique_ptr<device::Memory> scratch_;  // where kernels do not reach the host's memory
};

}  // namespace strata::engine
