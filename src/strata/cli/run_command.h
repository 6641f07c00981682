// `strata run`: starts a training script on ranks, in which `deepspeed` is Strata, with the
// arguments of DeepSpeed's launcher. On one host this process becomes torchrun; on several it holds
// a connection of ssh to each. Threads: one. Errors: UsageError, IoError, Error.
#pragma once

#include <CLI/CLI.hpp>

#include "strata/cli/job_plan.h"

namespace strata::cli {

// Gives `command` the options, which are kept in `request`.
void add_run_options(CLI::App& command, JobRequest& request);

// Starts the job; returns its exit code, where this process does not become torchrun.
int run_job(JobRequest request);

}  // namespace strata::cli
