// The first part of `strata doctor`: limits of this machine, shared memory, io_uring, reads between
// ranks, drives, GPUs; seen without Python. A problem stops jobs, a note makes them slower; both
// say what to do. Threads: one, which forks. Errors: ConfigError for a wrong configuration.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "strata/cli/console.h"
#include "strata/device/device.h"

namespace strata::cli {

struct MachineRequest {
  std::vector<std::string> folders;  // on drives for offloading
  std::string config;                // a file whose drives are looked at, too; empty: none
  std::filesystem::path root = "/";  // holds dev/, proc/ and sys/; another one in tests
};

// JSON: "facts", {name: {"text": ..., and numbers}}; "problems" and "notes", texts; "right".
Report look_at_machine(const MachineRequest& request);
void add_problem(Report& report, const std::string& text);

// Runs a kernel; returns why its result is wrong, or nothing.
std::string try_kernel(device::Device& device);

// Runs `work` in a process of its own; returns its exit code, and 255 for any other end.
int run_forked(const std::function<int()>& work);

}  // namespace strata::cli
