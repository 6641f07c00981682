// The hosts of a job: a hostfile, as DeepSpeed's launcher and MPI read them, and which of its slots
// a job takes. A slot is a GPU, or without GPUs a process, by its number on the host. Values.
// Threads: any. Errors: UsageError, with the line or the part that is meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace strata::cli {

struct Host {
  std::string name;
  std::vector<int> slots;
  bool operator==(const Host&) const = default;
};

// Lines "name slots=4"; '#' begins a comment. `path` is for messages.
std::vector<Host> parse_hostfile(std::string_view text, const std::string& path);

// What `include` names alone, or all but what `exclude` names; both empty: all. Either is
// "host@host:0,2@host:1": a host without slots means all of its slots. Not both may be given.
std::vector<Host> choose_hosts(const std::vector<Host>& hosts, const std::string& include,
                               const std::string& exclude);

}  // namespace strata::cli
