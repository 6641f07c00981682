// The operations on which ranks have to agree before they continue: the text that names a gather or
// a reduction, its checked arguments, and the sync points that find out whether all ranks came for
// the same operation, and whether each of them can do a step.
// Threads: collectives.h; descriptions are pure. Errors: UsageError for arguments that cannot be
// right on this rank; a CommError says which operation each rank does, or which rank cannot do the
// step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"

namespace strata::comm {

struct BulkOperation {
  std::string what;             // equal on ranks that do the same thing
  std::span<std::byte> source;  // this rank's slice, or its whole contribution
};

BulkOperation describe_gather(const SliceMap& slices, std::span<std::byte> flat, int rank,
                              int world_size, std::string_view tag);
BulkOperation describe_reduction(const Reduction& reduction, int world_size, std::string_view tag);
BulkOperation describe_exchange(const Exchange& exchange, int rank, int world_size,
                                std::string_view tag);
std::string describe_broadcast(Bytes bytes, int root, int world_size);

// The values of two ranks in an all-reduce. A NaN compares as neither smaller nor larger.
inline double combine_values(double a, double b, ReduceOp op) {
  return op == ReduceOp::kSum ? a + b : op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b);
}

// `buffer` is not one of the collectives that shall use it. `role`: "buffer of an all_gather".
[[noreturn]] void throw_foreign_buffer(std::string_view role, const SharedBuffer& buffer,
                                       std::string_view tag);

// The text that a rank sends instead of its operation after it has announced its departure.
std::string departure_text(std::string_view words);
// The error of ranks that came for different operations; `whats` by rank. It names the ranks that
// have left first.
std::string different_operations(const std::vector<std::string>& whats, RankNames names = {});

// Collective over `control`: the sync point before an operation. It finds a rank that came for
// another operation before a stream or a backend waits for it in vain. Collectives that move bulk
// data beside a control plane begin each operation with it, so several of them may share one
// control plane. `what`: equal on ranks that do the same. Returns every rank's `number`, by rank;
// numbers are below 2^52.
std::vector<std::uint64_t> agree_on_operation(Collectives& control, const std::string& what,
                                              RankNames names, std::uint64_t number = 0);

// The text that different_operations() takes for a rank that does `what`: `what`, or its departure.
std::string description_of(const Collectives& collectives, const std::string& what);

// The first rank whose text is not empty; `texts` by rank. Absent: all are empty.
std::optional<std::size_t> first_text(std::span<const std::string> texts);

// The text of the Error that `step` threw, for the other ranks; empty: it threw none.
template <typename Step>
std::string error_of(Step&& step) {
  try {
    std::forward<Step>(step)();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

// `errors`: by rank; empty: that rank can do the step. CommError, alike on every rank, that names
// the first rank that cannot do `what` ("reach the others").
void agree_all_can(std::span<const std::string> errors, std::string_view what, RankNames names);

}  // namespace strata::comm
