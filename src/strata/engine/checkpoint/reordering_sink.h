// Brings the elements of channels_last parameters into the order of their slots, or out of it,
// while values are loaded (plan/channel_order.h). Neighbours in one order are far apart in the
// other, so it keeps a parameter's elements on the host until all are there. Other parameters pass
// through. Threads: the engine's. Ownership: borrows all. Memory: the parameters under way; weights
// of convolutions are small. Errors: UsageError for a parameter whose pieces differ in dtype.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "strata/engine/checkpoint/weight_loader.h"

namespace strata::engine {

// Adds the range of a parameter that a sink wants: the elements that this rank owns, or all if they
// have to be reordered.
void add_wanted(std::vector<format::ParamRange>& ranges, const Weights& weights, std::size_t item,
                int param, bool reordered);

class ReorderingSink final : public ValueSink {
 public:
  ReorderingSink(Engine& engine, ValueSink& values) : engine_(engine), values_(values) {}

  std::vector<format::ParamRange> wanted() const override { return values_.wanted(); }
  void enqueue_store(std::size_t item, Numel begin, Numel numel, const std::byte* source,
                     DType source_dtype) override;
  void settle() override;

 private:
  struct Collected {
    DType dtype;
    Numel filled;
    std::vector<std::byte> bytes;
  };

  Engine& engine_;
  ValueSink& values_;
  std::map<std::size_t, Collected> collected_;
  std::vector<std::vector<std::byte>> queued_;  // until the device has read them
};

}  // namespace strata::engine
