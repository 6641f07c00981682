#include <fmt/core.h>
#include <fmt/ranges.h>
#include <gnu/libc-version.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <utility>

#include "strata/base/error.h"
#include "strata/cli/commands.h"
#include "strata/device/cuda_device.h"
#include "strata/engine/config/config.h"
#include "strata/io/folder_calls.h"
#include "strata/io/process_memory.h"
#include "strata/memory/host_buffer.h"
#include "strata/offload/block_file.h"

namespace strata::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// NCCL and the workers of data loaders share memory there; containers have 64 MiB by default.
constexpr Bytes kSharedLeast = 512_MiB;

void add_line(Report& report, const std::string& name, const std::string& text) {
  report.text += fmt::format("{:<13} {}\n", name, text);
}
// `more`: values for programs.
void add(Report& report, const std::string& name, const std::string& text,
         Json more = Json::object()) {
  more["text"] = text;
  report.json["facts"][name] = std::move(more);
  add_line(report, name, text);
}
void add_note(Report& report, const std::string& text) {
  report.json["notes"].push_back(text);
  add_line(report, "note", text);
}

Bytes free_space(const std::string& path) {
  return io::FolderCalls().free_space(path).value_or(0_B);
}

// Whether processes below one launcher read each other's memory.
bool ranks_read_each_other() {
  const std::array<std::byte, 64> memory{};
  const std::array<std::span<const std::byte>, 1> parts{memory};
  return run_forked([&] {
           io::OfferedMemory offer(parts);
           offer.permit_siblings();
           return run_forked([text = offer.to_text()] {
             try {
               io::ProcessMemory{text};
               return 0;
             } catch (const Error&) {
               return 1;
             }
           });
         }) == 0;
}

void add_system(Report& report, const fs::path& root) {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  add(report, "program", fmt::format("{}, {}", STRATA_VERSION, program.string()));
  utsname system{};
  ::uname(&system);
  add(report, "system",
      fmt::format("{} {}, glibc {}", system.release, system.machine, ::gnu_get_libc_version()));
  const Bytes available = memory::available_memory(root);
  add(report, "memory", to_string(available) + " available", {{"available", available.value}});
  cpu_set_t cores;
  const int count = ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 0;
  add(report, "cores", std::to_string(count), {{"count", count}});
  rlimit locked{};
  ::getrlimit(RLIMIT_MEMLOCK, &locked);
  const bool unlimited = locked.rlim_cur == RLIM_INFINITY;
  add(report, "ulimit -l", unlimited ? "unlimited" : to_string(Bytes(locked.rlim_cur)));
  for (const auto& [name, path] :
       {std::pair("memory.max", "sys/fs/cgroup/memory.max"),
        {"cpu.max", "sys/fs/cgroup/cpu.max"},
        {"huge pages", "sys/kernel/mm/transparent_hugepage/enabled"},
        {"in /dev/shm", "sys/kernel/mm/transparent_hugepage/shmem_enabled"},
        {"ptrace_scope", "proc/sys/kernel/yama/ptrace_scope"}}) {
    std::ifstream file(root / path);
    if (std::string line; std::getline(file, line)) add(report, name, line);
  }
  const std::string shared = root / "dev/shm";
  const Bytes free = free_space(shared);
  add(report, "/dev/shm", to_string(free) + " free", {{"free", free.value}});
  if (free >= kSharedLeast && ::access(shared.c_str(), W_OK) == 0) return;
  add_problem(report,
              fmt::format("NCCL and data loaders share memory in /dev/shm, which is missing, "
                          "full, too small or not writable; run the container with "
                          "--shm-size=8g or --ipc=host, or mount a tmpfs there; wanted {} "
                          "free, found {}",
                          to_string(kSharedLeast), to_string(free)));
}

void add_permissions(Report& report) {
  const io::ChosenEngine chosen = io::make_io_engine();
  add(report, "io_uring", chosen.refused.empty() ? "allowed" : "refused");
  memory::HostBuffer memory(8_MiB);
  const auto registration = chosen.engine->register_memory(memory.bytes());
  if (!chosen.refused.empty())
    add_note(report, "threads serve drives, slower than io_uring: " + chosen.refused);
  else if (!registration->refused().empty())
    add_note(report, "transfers cost more, without registered memory: " + registration->refused());
  const bool read = ranks_read_each_other();
  add(report, "ranks", read ? "read each other's memory" : "cannot read each other's memory");
  if (!read)
    add_note(report,
             "each rank loads a model by itself; permit process_vm_readv: docker run "
             "--cap-add=SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0");
}

void add_drive(Report& report, const std::string& folder) {
  const auto [file_system, medium] = offload::file_system_of(folder);
  try {
    const std::string path = io::temporary_name(folder + "/strata_doctor");
    const io::File file(path, io::File::Mode::kCreateNew);
    io::remove_file(path);
    const bool direct =
        file.direct().direct_fd() >= 0 && medium != offload::FileSystem::Medium::kMemory;
    const Bytes free = free_space(folder);
    add(report, "drive " + folder,
        fmt::format("{}, {} free, {}O_DIRECT", file_system, to_string(free), direct ? "" : "no "),
        {{"file_system", file_system}, {"free", free.value}, {"direct", direct}});
    if (!direct)
      add_note(report,
               "transfers go through the page cache, slower than on ext4 or xfs: " + folder);
  } catch (const IoError& error) {
    add_problem(report, fmt::format("no file can be made in {}; name a folder that exists and that "
                                    "you may write to: {}",
                                    folder, error.what()));
  }
}

// 13020 is 13.2, as CUDA counts; 0: none.
std::string cuda_version(int number) {
  return number == 0 ? "none" : fmt::format("{}.{}", number / 1000, number % 1000 / 10);
}

void add_gpus(Report& report, const fs::path& root) {
  const device::CudaFacts facts = device::cuda_facts();
  const std::string versions = fmt::format("kernels of CUDA {}, driver: {}",
                                           cuda_version(facts.toolkit), cuda_version(facts.driver));
  add(report, "CUDA", versions, {{"kernels", facts.toolkit}, {"driver", facts.driver}});
  for (std::size_t i = 0; i < facts.gpus.size(); ++i) {
    const device::CudaFacts::Gpu& gpu = facts.gpus[i];
    add(report, fmt::format("GPU {}", i),
        fmt::format("{}, capability {}, {}, reaches GPUs {}", gpu.name,
                    fmt::join(gpu.capability, "."), to_string(gpu.memory), gpu.peers),
        {{"capability", gpu.capability}, {"memory", gpu.memory.value}, {"peers", gpu.peers}});
    std::string wrong;
    try {
      wrong = try_kernel(*device::make_cuda_device({.index = static_cast<int>(i)}));
    } catch (const Error& error) {
      wrong = error.what();
    }
    if (!wrong.empty())
      add_problem(report,
                  fmt::format("no kernel runs on GPU {}; update its driver if that is older "
                              "than the kernels: {}: {}",
                              i, versions, wrong));
  }
  if (!facts.gpus.empty()) return;
  add(report, "GPUs", "none: " + facts.absence);
  std::error_code error;
  if (fs::exists(root / "dev/nvidia0", error))
    add_problem(report,
                "Strata cannot use the GPU of this machine (/dev/nvidia0); see "
                "CUDA_VISIBLE_DEVICES, or docker run --gpus all: " +
                    facts.absence);
}

}  // namespace

Report look_at_machine(const MachineRequest& request) {
  std::vector<std::string> folders = request.folders;
  if (!request.config.empty()) {
    const engine::OffloadConfig offload = engine::Config::parse(request.config).offload;
    for (const auto* more : {&offload.param_folders, &offload.optimizer_folders})
      folders.insert(folders.end(), more->begin(), more->end());
  }
  Report report;
  report.json = Json::parse(R"({"facts": {}, "problems": [], "notes": [], "right": true})");
  add_system(report, request.root);
  add_permissions(report);
  for (auto folder = folders.begin(); folder != folders.end(); ++folder) {
    if (std::find(folders.begin(), folder, *folder) == folder) add_drive(report, *folder);
  }
  add_gpus(report, request.root);
  return report;
}

void add_problem(Report& report, const std::string& text) {
  report.json["problems"].push_back(text);
  report.json["right"] = report.right = false;
  add_line(report, "PROBLEM", text);
}

std::string try_kernel(device::Device& device) {
  std::array<float, 4> values{1, 2, 3, 4};
  const auto host = std::as_writable_bytes(std::span(values));
  const auto memory = device.allocate(Bytes(host.size()), memory::Kind::kWorkspace);
  const auto there = memory->bytes().first(host.size());
  const std::span<float> floats(reinterpret_cast<float*>(there.data()), values.size());
  device::Stream& stream = device.compute_stream();
  device.copy(there, host, stream);
  const std::byte* const sources[] = {there.data()};
  device.sum_in_order(floats, sources, DType::kFloat32, 2.0F, /*accumulate=*/false, stream);
  device.copy(host, there, stream);
  stream.synchronize();
  return values == std::array<float, 4>{2, 4, 6, 8} ? "" : "it computes wrong values";
}

int run_forked(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  int status = 0;
  const bool ended = child > 0 && ::waitpid(child, &status, 0) == child;
  return ended && WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

}  // namespace strata::cli
