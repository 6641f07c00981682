// For C++ programs: this process's rank, and the job's size and address, from the environment as
// launchers set it: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (torchrun --no-python, or a loop in
// a shell). Plain values. Errors: ConfigError that names the variable; CommError if other ranks do
// not come within the timeout.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

#include "strata/comm/collectives.h"
#include "strata/engine/config/config.h"
#include "strata/torch/ranks/c10d_collectives.h"

namespace strata::torch {

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  std::string master_address;  // of the host where rank 0 listens, while the ranks find each other
  std::uint16_t master_port = 0;
  bool launcher_listens = false;  // torchrun's agent holds the port; no rank listens
  int attempt = 0;                // torchrun starts all ranks anew after a failure

  // Without WORLD_SIZE: rank 0 of 1. The address and port are asked for only above one rank.
  static RankEnvironment read();
};

// Collective. The ranks must be on one host: they use shared memory for a model on the CPU, and
// peer copies for a model on GPUs. For other ranks it throws ConfigError, which says to make a
// process group and to pass make_c10d_collectives() or make_device_collectives() to the trainer.
// `place`: the model's device.
std::shared_ptr<comm::Collectives> make_collectives(const RankEnvironment& environment,
                                                    const engine::Config& config,
                                                    c10::Device place);

}  // namespace strata::torch
