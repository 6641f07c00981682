// Collectives over a backend of a c10d process group: gloo on hosts, NCCL on GPUs. Gathers are
// collectives here, not one-sided, and sums are in the order of the backend. For ranks on several
// hosts, and for processes of one host that may not read each other's memory. Before each bulk
// operation ranks compare tags. So different operations at one time (one rank reduces 'a', another
// 'b') are an error and not a hang. After the backend was let go, every operation is an error.
// Threads, ownership, errors: see collectives.h; the timeout is the process group's.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "strata/comm/collectives.h"
#include "strata/torch/ranks/group_backend.h"

namespace strata::torch {

// `name`: the backend's, "gloo" or "nccl". `store` carries the reasons of failures. `id`
// distinguishes groups that share a store, and is the same on every rank. `names`: the ranks' names
// in errors.
std::unique_ptr<comm::Collectives> make_c10d_collectives(std::shared_ptr<GroupBackend> group,
                                                         c10::intrusive_ptr<c10d::Store> store,
                                                         std::string id, std::string name,
                                                         comm::RankNames names = {});

}  // namespace strata::torch
