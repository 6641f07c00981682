// Gathers and reductions for a backend that takes whole tensors: the text that names an operation
// in errors and tells it from others, its checked arguments, and the memory that it reads. Pure.
// Errors: UsageError for arguments that cannot be right on this rank.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"

namespace strata::comm {

struct BulkOperation {
  std::string what;             // equal on ranks that do the same thing
  std::span<std::byte> source;  // this rank's slice, or its whole contribution
};

BulkOperation describe_gather(const SliceMap& slices, std::span<std::byte> flat, int rank,
                              int world_size, std::string_view tag);
BulkOperation describe_reduction(const Reduction& reduction, int world_size, std::string_view tag);
std::string describe_broadcast(Bytes bytes, int root, int world_size);

// The text that a rank sends instead of its operation after it has announced its departure.
std::string departure_text(std::string_view words);
// The error of ranks that came for different operations; `whats` by rank. It names the ranks that
// have left first.
std::string different_operations(const std::vector<std::string>& whats, RankNames names = {});

}  // namespace strata::comm
