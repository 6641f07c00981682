// Gathers and reductions as a backend that takes whole tensors sees them: the text that names one
// in errors and tells it from others, its arguments checked, and the memory it reads. Pure.
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

// The text in place of its operation that a rank sends after it has announced its departure.
std::string departure_text(std::string_view words);
// The error of ranks that met in different operations; `whats` by rank. Those that have left are
// named first.
std::string different_operations(const std::vector<std::string>& whats, RankNames names = {});

}  // namespace strata::comm
