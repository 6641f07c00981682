// The map from file ranges to parameter ranges that loading follows: every parameter is made of
// pieces of checkpoint tensors (one usually; one an expert where the model holds a fused [E, ...]
// weight), all is checked at once, and then a rank asks for the copies that fill exactly its own
// elements. A piece is a run of elements that keeps its order; dtypes may differ if both are
// floating, and the code that copies casts. Threads: immutable after construction; safe everywhere.
// Units: elements; offsets of files in bytes. Errors: FormatError if the checkpoint does not fit
// the model, which lists all that is missing, misshapen or of a wrong dtype; UsageError if the
// pieces themselves leave a hole, overlap or go beyond their parameter.
#pragma once

#include <compare>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/format/checkpoint_index.h"

namespace strata::format {

struct SourceRange {
  std::string tensor;               // its name in the checkpoint
  std::vector<std::int64_t> shape;  // that the whole tensor must have
  Numel destination;                // first element of the parameter that the piece fills
  Numel source_begin;               // first element of the tensor that is taken
  std::optional<Numel> numel;       // how many; all from source_begin on if not given
};

struct ParamSources {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
  std::vector<SourceRange> pieces;
};

// Elements [begin, end) of a parameter, by its place in the list that the map was made from.
struct ParamRange {
  std::size_t param = 0;
  Numel begin;
  Numel end;
};

// Read `numel` elements of `source_dtype` at `offset` of the file; they are elements [param_begin,
// param_begin + numel) of the parameter.
struct RangeCopy {
  std::size_t file = 0;
  Bytes offset;
  DType source_dtype = DType::kFloat32;
  std::size_t param = 0;
  Numel param_begin;
  Numel numel;
  Bytes bytes() const { return bytes_of(numel, source_dtype); }  // of the file
  bool operator==(const RangeCopy&) const = default;
};

// A place in the checkpoint, in the order of reading.
struct FileOffset {
  std::size_t file = 0;
  Bytes offset;
  auto operator<=>(const FileOffset&) const = default;
};

class WeightMap {
 public:
  // `origin` names the checkpoint in messages.
  WeightMap(std::span<const ParamSources> params, std::span<const CheckpointTensor> checkpoint,
            std::string_view origin);

  // The copies that fill these ranges and nothing else, by file and offset, so that reading goes
  // forward.
  std::vector<RangeCopy> intersect(std::span<const ParamRange> ranges) const;
  // Behind the last byte that the parameter takes; the beginning where it takes none.
  FileOffset end_of(std::size_t param) const;
  // Tensors of the checkpoint that no piece names, in the checkpoint's order.
  const std::vector<std::string>& unused() const { return unused_; }

 private:
  std::vector<std::vector<RangeCopy>> copies_;  // by parameter, by param_begin
  std::vector<std::string> unused_;
};

}  // namespace strata::format
