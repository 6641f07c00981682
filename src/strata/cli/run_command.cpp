#include "strata/cli/run_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

#include "strata/base/error.h"
#include "strata/cli/python_module.h"
#include "strata/cli/ssh_job.h"

namespace strata::cli {
namespace {

constexpr const char* kDefaultHostfile = "/job/hostfile";
constexpr int kSlotsMax = 4096;
constexpr int kHostsMax = 65536;
constexpr int kPortMax = 65535;

int count_gpus() {
  int count = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    constexpr std::string_view kStart = "nvidia";
    const std::string name = entry.path().filename().string();
    if (name.size() > kStart.size() && name.starts_with(kStart) &&
        name.find_first_not_of("0123456789", kStart.size()) == std::string::npos)
      ++count;
  }
  return count;
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw UsageError(fmt::format("--hostfile: '{}' cannot be read", path));
  return {std::istreambuf_iterator<char>(file), {}};
}

// Lines NAME=VALUE that a user keeps for other hosts, in the working or the home folder.
void add_environment_file(Machine& machine) {
  const char* const named = std::getenv("DS_ENV_FILE");
  const std::string name = named != nullptr ? named : ".deepspeed_env";
  const char* const home = std::getenv("HOME");
  for (const std::string& folder : {machine.folder, std::string(home != nullptr ? home : "")}) {
    std::ifstream file(std::filesystem::path(folder) / name);
    for (std::string line; std::getline(file, line);) {
      const auto equals = line.find('=');
      if (equals != std::string::npos && line[0] != '#')
        machine.passed_on.emplace_back(line.substr(0, equals), line.substr(equals + 1));
    }
  }
}

Machine this_machine(JobRequest& request) {
  Machine machine;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=');
    if (equals != std::string_view::npos)
      machine.environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  machine.gpus = count_gpus();
  machine.folder = std::filesystem::current_path().string();
  if (request.hostfile.empty() && std::filesystem::exists(kDefaultHostfile))
    request.hostfile = kDefaultHostfile;
  if (!request.hostfile.empty()) machine.hostfile = text_of_file(request.hostfile);
  add_environment_file(machine);
  return machine;
}

}  // namespace

void add_run_options(CLI::App& command, JobRequest& request) {
  command
      .add_option("--num_gpus,--num_accelerators", request.num_gpus,
                  "Ranks of each host; all GPUs, if not given")
      ->check(CLI::Range(1, kSlotsMax));
  command.add_option("--num_nodes", request.num_nodes, "The first so many hosts of the hostfile")
      ->check(CLI::Range(1, kHostsMax));
  command.add_option("-H,--hostfile", request.hostfile,
                     fmt::format("Lines \"HOST slots=N\"; {}, if there is one", kDefaultHostfile));
  command.add_option("-i,--include", request.include, "Only HOST[:SLOT,...][@HOST...]");
  command.add_option("-e,--exclude", request.exclude, "All but HOST[:SLOT,...][@HOST...]");
  command.add_option("--master_addr", request.master_addr, "The host of rank 0; the first");
  command.add_option("--master_port", request.master_port, "Its port; one that is free, or 29500")
      ->check(CLI::Range(1, kPortMax));
  command.add_option("--ssh_port", request.ssh_port, "Where the hosts listen for ssh")
      ->check(CLI::Range(1, kPortMax));
  command.add_option("--launcher", request.launcher, "ssh, which pdsh also means");
  command.add_flag("--force_multi", request.force_multi, "Use ssh for a single host, too");
  command.add_flag("--no_ssh", request.no_ssh, "Start this host's ranks alone, as --node_rank");
  command.add_option("--node_rank", request.node_rank, "With --no_ssh: which host this is")
      ->check(CLI::Range(0, kHostsMax));
  command.add_option("--enable_each_rank_log", request.log_folder, "A folder for ranks' output");
  command.add_flag("--module", request.module, "SCRIPT is a module, as of python -m");
  command.add_flag("--no_python", request.no_python, "SCRIPT is a program");
  command.add_flag("--no_local_rank", request.no_local_rank,
                   "Never pass --local_rank; else to scripts that name it");
  command.prefix_command();  // what follows the script is its own
}

int run_job(JobRequest request) {
  const Machine machine = this_machine(request);
  auto starts = plan_job(request, machine);
  if (starts.size() == 1 && starts[0].host.empty()) {
    for (const auto& [name, value] : starts[0].environment)
      ::setenv(name.c_str(), value.c_str(), 1);
    become_python(std::move(starts[0].arguments));
  }
  std::vector<std::vector<std::string>> commands;
  for (const JobStart& start : starts)
    commands.push_back(ssh_arguments(start, request, machine, find_python()));
  return run_together("ssh", commands);
}

}  // namespace strata::cli
