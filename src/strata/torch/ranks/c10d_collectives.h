// Collectives over a backend of a c10d process group: gloo on hosts, NCCL on GPUs. Gathers are
// collectives here, not one-sided, and sums are in the order of the backend. For ranks on several
// hosts, and where processes of one host may not read each other's memory. Operations of different
// kinds that meet (one rank reduces 'a', another 'b') are found by comparing tags before each bulk
// operation, so they are an error and not a hang. Once the backend was let go every operation is an
// error. Threads, ownership, errors: see collectives.h;
// the timeout is the process group's own.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"
#include "strata/torch/ranks/group_backend.h"

namespace strata::torch {

// `name`: of the backend, "gloo" or "nccl". `store` carries the reasons of failures; `id` tells
// groups that share a store apart, the same on every rank. `names`: of its ranks, in errors.
std::unique_ptr<comm::Collectives> make_c10d_collectives(std::shared_ptr<GroupBackend> group,
                                                         c10::intrusive_ptr<c10d::Store> store,
                                                         std::string id, std::string name,
                                                         comm::RankNames names = {});

}  // namespace strata::torch
