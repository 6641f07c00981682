#include "strata/cli/job_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "strata/base/error.h"

namespace strata::cli {
namespace {

constexpr int kDefaultPort = 29500;  // DeepSpeed's, and torchrun's
constexpr const char* kDevices = "CUDA_VISIBLE_DEVICES";
constexpr const char* kCompat = "STRATA_COMPAT";
constexpr const char* kLocal = "localhost";

// What other hosts get of this one's environment, as far as it is set.
constexpr const char* kPassedOn[] = {"NCCL_", "PYTHON", "UCX_", "STRATA_",         "OMP_", "HF_",
                                     "TORCH", "GLOO_",  "CUDA", "LD_LIBRARY_PATH", "FI_"};

std::string value_of(const Machine& machine, const char* name) {
  const auto found = machine.environment.find(name);
  return found == machine.environment.end() ? "" : found->second;
}

// Devices of this host as a user has limited them; nothing where no one has.
std::optional<std::vector<std::string>> visible_devices(const Machine& machine) {
  if (!machine.environment.contains(kDevices)) return std::nullopt;
  std::vector<std::string> devices;
  std::string name;
  for (const char c : value_of(machine, kDevices) + ",") {
    if (c == ',') {
      if (!name.empty() && name != "-1") devices.push_back(name);
      name.clear();
    } else if (c != ' ') {
      name += c;
    }
  }
  return devices;
}

std::vector<Host> this_host(const JobRequest& request, const Machine& machine) {
  const auto visible = visible_devices(machine);
  const int gpus = visible ? static_cast<int>(visible->size()) : machine.gpus;
  const bool filtered = !request.include.empty() || !request.exclude.empty();
  const int count = gpus > 0 ? gpus : request.num_gpus.value_or(0);
  if (count == 0) {
    throw UsageError(filtered ? "--include, --exclude: this host has no GPU to choose"
                              : "this host has no GPU; --num_gpus N starts N ranks on the CPU");
  }
  Host host{kLocal, std::vector<int>(static_cast<std::size_t>(count))};
  std::iota(host.slots.begin(), host.slots.end(), 0);
  return {std::move(host)};
}

std::vector<Host> hosts_of(const JobRequest& request, const Machine& machine) {
  const bool filtered = !request.include.empty() || !request.exclude.empty();
  if (filtered && (request.num_gpus || request.num_nodes)) {
    throw UsageError("--include and --exclude name slots: leave --num_gpus and --num_nodes out");
  }
  auto hosts = machine.hostfile.empty() ? this_host(request, machine)
                                        : parse_hostfile(machine.hostfile, request.hostfile);
  hosts = choose_hosts(hosts, request.include, request.exclude);
  if (machine.hostfile.empty() && request.no_ssh && request.num_nodes)
    hosts.resize(static_cast<std::size_t>(*request.num_nodes), hosts[0]);  // all alike
  if (request.num_nodes) {
    if (static_cast<std::size_t>(*request.num_nodes) > hosts.size()) {
      throw UsageError(fmt::format(
          "--num_nodes {}: {} named; give a --hostfile that names more", *request.num_nodes,
          machine.hostfile.empty() ? "no host is" : fmt::format("{} are", hosts.size())));
    }
    hosts.resize(static_cast<std::size_t>(*request.num_nodes));
  }
  for (Host& host : hosts) {
    if (!request.num_gpus) continue;
    if (static_cast<std::size_t>(*request.num_gpus) > host.slots.size()) {
      throw UsageError(fmt::format("--num_gpus {}: host '{}' has {}", *request.num_gpus, host.name,
                                   host.slots.size()));
    }
    host.slots.resize(static_cast<std::size_t>(*request.num_gpus));
  }
  return hosts;
}

// What torchrun runs on each rank.
void add_script(const JobRequest& request, std::vector<std::string>& arguments) {
  if (request.no_python) {
    arguments.emplace_back("--no-python");
  } else {
    arguments.insert(arguments.end(), {"--module", "strata.compat.run"});
    if (request.no_local_rank) arguments.emplace_back("--no_local_rank");
    if (request.module) arguments.emplace_back("--module");
  }
  arguments.insert(arguments.end(), request.command.begin(), request.command.end());
}

JobStart start_of(const JobRequest& request, const std::vector<Host>& hosts, std::size_t index,
                  bool alone) {
  JobStart start;
  start.host = alone ? "" : hosts[index].name;
  auto& arguments = start.arguments;
  arguments = {"-m", "torch.distributed.run",
               fmt::format("--nproc-per-node={}", hosts[index].slots.size())};
  if (alone && !request.master_port && request.master_addr.empty()) {
    arguments.emplace_back("--standalone");  // on a port that is free
  } else {
    const std::string& first = alone ? "127.0.0.1" : hosts[0].name;
    arguments.insert(
        arguments.end(),
        {fmt::format("--nnodes={}", alone ? 1 : hosts.size()), fmt::format("--node-rank={}", index),
         fmt::format("--master-addr={}", request.master_addr.empty() ? first : request.master_addr),
         fmt::format("--master-port={}", request.master_port.value_or(kDefaultPort))});
  }
  if (!request.log_folder.empty())
    arguments.insert(arguments.end(), {"--log-dir=" + request.log_folder, "--redirects=3"});
  add_script(request, arguments);
  start.environment.emplace_back(kCompat, "deepspeed");
  return start;
}

// The names of chosen slots: devices by their numbers, or by what the user calls them.
std::string devices_of(const Host& host, const Machine& machine, bool local) {
  const auto visible = local ? visible_devices(machine) : std::nullopt;
  std::vector<std::string> names;
  for (const int slot : host.slots) {
    const auto place = static_cast<std::size_t>(slot);
    names.push_back(visible && place < visible->size() ? (*visible)[place] : std::to_string(slot));
  }
  return fmt::format("{}", fmt::join(names, ","));
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

bool is_passed_on(const std::string& name) {
  return name != kDevices &&
         std::any_of(std::begin(kPassedOn), std::end(kPassedOn),
                     [&](const char* start) { return name.starts_with(start); });
}

void require_meaningful(const JobRequest& request) {
  if (request.command.empty())
    throw UsageError("name the script that is to run: strata run SCRIPT");
  if (request.module && request.no_python)
    throw UsageError("--module and --no_python: give one of the two");
  if (request.launcher != "ssh" && request.launcher != "pdsh") {
    throw UsageError(
        fmt::format("--launcher {}: hosts are reached by ssh alone; leave it out, or give "
                    "--no_ssh and start the command on each host yourself",
                    request.launcher));
  }
  if (request.node_rank && !request.no_ssh)
    throw UsageError("--node_rank: only with --no_ssh, where you start the command on each host");
}

}  // namespace

std::vector<JobStart> plan_job(const JobRequest& request, const Machine& machine) {
  require_meaningful(request);
  const std::vector<Host> hosts = hosts_of(request, machine);
  const bool alone = hosts.size() == 1 && !request.force_multi;
  const bool chosen = !request.include.empty() || !request.exclude.empty();
  std::vector<JobStart> starts;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    starts.push_back(start_of(request, hosts, i, alone));
    if (chosen) {
      starts.back().environment.emplace_back(kDevices, devices_of(hosts[i], machine, alone));
    }
  }
  if (!request.no_ssh) return starts;
  if (!request.node_rank || request.master_addr.empty()) {
    throw UsageError(
        "--no_ssh: say which host this is and where rank 0 is: --node_rank and "
        "--master_addr");
  }
  const auto rank = static_cast<std::size_t>(*request.node_rank);
  if (rank >= starts.size()) {
    throw UsageError(fmt::format("--node_rank {}: there are {} hosts", rank, starts.size()));
  }
  starts[rank].host.clear();
  return {starts[rank]};
}

std::vector<std::string> ssh_arguments(const JobStart& start, const JobRequest& request,
                                       const Machine& machine, const std::string& python) {
  std::string command = fmt::format("cd {} && exec env", quoted(machine.folder));
  for (const auto& [name, value] : machine.environment)
    if (is_passed_on(name) && name != kCompat) command += ' ' + quoted(name + '=' + value);
  for (const auto& [name, value] : machine.passed_on) command += ' ' + quoted(name + '=' + value);
  for (const auto& [name, value] : start.environment) command += ' ' + quoted(name + '=' + value);
  command += ' ' + quoted(python);
  for (const std::string& argument : start.arguments) command += ' ' + quoted(argument);
  // With a terminal the ranks there end when the connection does.
  std::vector<std::string> arguments{"-tt", "-o", "BatchMode=yes"};
  if (request.ssh_port)
    arguments.insert(arguments.end(), {"-p", std::to_string(*request.ssh_port)});
  arguments.insert(arguments.end(), {start.host, command});
  return arguments;
}

}  // namespace strata::cli
