// The memory formats that a model's parameters lose under the engine, whose flat buffers hold
// every parameter in the order of its dimensions. Threads: any. Errors: none.
#pragma once

#include <span>
#include <string>

#include "strata/plan/param_spec.h"
#include "strata/torch/model/model_plan.h"

namespace strata::torch {

// A warning that names the first parameter whose strides are permuted (channels_last, say), counts
// the others, and says what that costs; empty where all are contiguous. `specs`: of the parameters.
std::string lost_memory_formats(std::span<const ModelParameter> parameters,
                                std::span<const plan::ParamSpec> specs);

}  // namespace strata::torch
