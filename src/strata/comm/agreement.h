// What ranks settle with each other before they go on.
//
// The meeting before an operation that all of them must do: who came for another one shows
// here, before a stream or a backend waits for what never comes. Collectives that carry bulk data
// beside a control plane begin each of their operations with it, so that several of them may share
// one control plane. Threads, errors: collectives.h; CommError that says what each rank does.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"

namespace strata::comm {

// Collective over `control`. `what`: equal on ranks that do the same. Returns everybody's `number`,
// by rank; numbers are below 2^52.
std::vector<std::uint64_t> agree(Collectives& control, const std::string& what, RankNames names,
                                 std::uint64_t number = 0);

// Of everybody's text, by rank: the first rank that has something to say; none: nobody has.
std::optional<std::size_t> first_to_say(std::span<const std::string> texts);

// `errors`: everybody's, by rank; empty: that rank can. CommError, alike on every rank, that names
// the first rank that cannot do `what` ("reach the others").
void require_that_all_can(std::span<const std::string> errors, std::string_view what,
                          RankNames names);

}  // namespace strata::comm
