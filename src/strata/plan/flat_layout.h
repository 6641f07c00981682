// The flat layout of one unit: parameters in order in one buffer, each aligned to 256 bytes
// (grouped matrix multiplications need it), the whole padded to world_size equal slices, each a
// multiple of 256 bytes; where states have 8 bits, all of these are multiples of 256 elements, so
// that no slice cuts a block of them. Rank r owns slice r: its shard. One layout serves every
// stage, weights and gradients alike (offsets are in elements, so a buffer of another dtype has the
// same layout). Pure arithmetic, immutable.
#pragma once

#include <span>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/plan/param_spec.h"

namespace strata::plan {

// Where one parameter lies in its unit's flat buffer.
struct Slot {
  int param = 0;  // index into the model's parameters
  Numel offset;
  Numel numel;
  Numel end() const { return offset + numel; }
};

// Elements [begin, end) of one parameter, and where they start in a shard.
struct ShardRange {
  int slot = 0;  // index into FlatLayout::slots
  Numel param_begin;
  Numel param_end;
  Numel shard_offset;
};

// Elements [begin, end) of a shard that belong to one parameter.
struct ParamSegment {
  int param = 0;  // index into the model's parameters
  int group = 0;  // its param group
  Numel begin;
  Numel end;
};

class FlatLayout {
 public:
  // `params` are the unit's, all of `dtype`, in order; `param_indices` their places in the model.
  FlatLayout(std::span<const ParamSpec> model, std::vector<int> param_indices, DType dtype,
             int world_size);

  const std::vector<Slot>& slots() const { return slots_; }
  DType dtype() const { return dtype_; }
  int world_size() const { return world_size_; }
  Numel used() const { return used_; }      // sum of the parameters, without padding
  Numel padded() const { return padded_; }  // world_size * shard
  Numel shard() const { return padded_ / world_size_; }
  Bytes flat_bytes() const { return bytes_of(padded_, dtype_); }
  Bytes shard_bytes() const { return bytes_of(shard(), dtype_); }

  // The parts of parameters in rank r's shard, in order; padding left out.
  std::vector<ShardRange> pieces(int rank) const;

  // Rank r's shard cut by parameter. Padding between two belongs to the segment before it (its
  // values are zero and stay zero), so that neighbours can be updated as one.
  std::vector<ParamSegment> segments(int rank, std::span<const ParamSpec> model) const;

 private:
  std::vector<Slot> slots_;
  DType dtype_;
  int world_size_;
  Numel used_;
  Numel padded_;
};

}  // namespace strata::plan
