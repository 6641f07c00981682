// What `strata run` starts: the arguments of DeepSpeed's launcher, as those of torchrun on each
// host. There is no launcher here: torchrun starts and watches the ranks of a host, ssh reaches the
// hosts. Values; nothing is started. Threads: any. Errors: UsageError.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strata/cli/host_list.h"

namespace strata::cli {

struct JobRequest {
  std::string hostfile;  // empty: /job/hostfile, if there is one
  std::string include;
  std::string exclude;
  std::optional<int> num_gpus;   // of each host
  std::optional<int> num_nodes;  // the first so many
  std::string master_addr;
  std::optional<int> master_port;
  std::optional<int> ssh_port;
  std::optional<int> node_rank;  // with no_ssh: which host this is
  std::string launcher = "ssh";
  std::string log_folder;  // of each rank's output
  bool no_ssh = false;     // somebody starts this command on each host
  bool force_multi = false;
  bool module = false;
  bool no_python = false;
  bool no_local_rank = false;
  std::vector<std::string> command;  // the script and its arguments
};

// Where the program runs.
struct Machine {
  std::map<std::string, std::string> environment = {};
  std::vector<std::pair<std::string, std::string>> passed_on = {};  // to other hosts, besides
  int gpus = 0;
  std::string folder = {};    // the working one
  std::string hostfile = {};  // its text; empty: there is none
};

struct JobStart {
  std::string host;                    // empty: this one
  std::vector<std::string> arguments;  // of python
  std::vector<std::pair<std::string, std::string>> environment;
};

// One start for each host, all of which together are the job.
std::vector<JobStart> plan_job(const JobRequest& request, const Machine& machine);

// The arguments of ssh that make one of several starts, in the same folder.
std::vector<std::string> ssh_arguments(const JobStart& start, const JobRequest& request,
                                       const Machine& machine, const std::string& python);

}  // namespace strata::cli
