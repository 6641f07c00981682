// Runs one function on N ranks, as threads or as forked processes, and collects their results. A
// rank that throws is reported as "threw: <message>", a process that died as "died: signal 9".
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"

namespace strata::comm::conformance {

using MakeRank = std::function<std::unique_ptr<Collectives>(int rank)>;
using RankBody = std::function<std::string(Collectives&)>;

std::vector<std::string> run_as_threads(int world_size, const MakeRank& make, const RankBody& body);

// Call from a process that has no other threads.
std::vector<std::string> run_as_processes(int world_size, const MakeRank& make,
                                          const RankBody& body);

}  // namespace strata::comm::conformance
