// Agreements of ranks before they continue: that all of them came for the same operation, and that
// each of them can do a step. Threads, errors: collectives.h; a CommError says which operation each
// rank does, or which rank cannot do the step.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"

namespace strata::comm {

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
