// Bandwidth of all_gather and reduce_scatter between ranks of this host, by size.
//   strata_bench_comm [--ranks 2] [--backend shm|local] [--min-mib 1] [--max-mib 256]
//                     [--repetitions N] [--json FILE]
// Size is the flat buffer's: a rank has it after an all_gather, and passes it to a reduce_scatter
// (fp32). GB/s is size / seconds, the time of the slowest rank, the median over the repetitions. A
// barrier follows each all_gather, so that both are timed as collectives. `copy` is the machine's
// limit: every rank copies the same number of bytes within its own memory at once.
#include <fmt/core.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "comm/file_bootstrap.h"
#include "strata/base/error.h"
#include "strata/comm/host/bulk_copy.h"
#include "strata/comm/host/host_collectives.h"

namespace strata::comm {
namespace {

struct Request {
  int ranks = 2;
  std::string backend = "shm";
  std::int64_t min_mib = 1;
  std::int64_t max_mib = 256;
  std::int64_t repetitions = 0;  // 0: by size
  std::string json;
};

Request parse(const std::vector<std::string>& arguments) {
  Request request;
  if (arguments.size() % 2 != 0) throw UsageError("every option takes a value");
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& name = arguments[i];
    const std::string& value = arguments[i + 1];
    if (name == "--ranks") {
      request.ranks = std::stoi(value);
    } else if (name == "--backend" && (value == "shm" || value == "local")) {
      request.backend = value;
    } else if (name == "--min-mib") {
      request.min_mib = std::stol(value);
    } else if (name == "--max-mib") {
      request.max_mib = std::stol(value);
    } else if (name == "--repetitions") {
      request.repetitions = std::stol(value);
    } else if (name == "--json") {
      request.json = value;
    } else {
      throw UsageError(fmt::format("unknown option or value ({} {})", name, value));
    }
  }
  return request;
}

// Median seconds of one call, of the slowest rank.
double measure(Collectives& c, std::int64_t repetitions, const std::function<void()>& call) {
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < repetitions; ++i) {
    c.barrier();
    const auto start = std::chrono::steady_clock::now();
    call();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  c.all_reduce(seconds, ReduceOp::kMax);
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

struct Figures {
  std::int64_t bytes;
  double all_gather;  // GB/s
  double reduce_scatter;
  double copy;
};

// The faster of ordinary and streaming stores, between two buffers of this rank.
double measure_copy(Collectives& c, std::int64_t repetitions, std::span<std::byte> target) {
  const std::vector<std::byte> source(target.size(), std::byte{1});
  double best = std::numeric_limits<double>::infinity();
  for (const CopyHint hint : {CopyHint::kInCaches, CopyHint::kPastCaches}) {
    best = std::min(best, measure(c, repetitions, [&] {
                      bulk_copy(target, source, hint, nullptr);
                      c.barrier();
                    }));
  }
  return best;
}

Figures measure_size(Collectives& c, std::int64_t mib, std::int64_t wanted_repetitions) {
  const std::int64_t world = c.world_size();
  const Numel slice((mib << 20) / 4 / world);
  const Bytes slice_bytes = bytes_of(slice, DType::kFloat32);
  const Bytes flat_bytes = slice_bytes * world;
  const std::int64_t repetitions =
      wanted_repetitions > 0 ? wanted_repetitions : std::clamp<std::int64_t>(2048 / mib, 9, 300);

  auto weights = c.allocate("weights", slice_bytes);
  std::memset(weights->local().data(), 1, slice_bytes.size());
  auto gradients = c.allocate("gradients", flat_bytes);
  std::memset(gradients->local().data(), 0, flat_bytes.size());
  std::vector<std::byte> flat(flat_bytes.size());
  std::vector<float> result(slice.size());

  const double gather = measure(c, repetitions, [&] {
    c.all_gather({weights.get(), 0_B, 0_B, slice_bytes}, flat, "weights")->wait();
    c.barrier();
  });
  const double reduce = measure(c, repetitions, [&] {
    c.reduce_scatter({gradients.get(), 0_B, DType::kFloat32, result, 1.0F, false}, "gradients")
        ->wait();
  });
  const double copy = measure_copy(c, repetitions, flat);
  c.barrier();
  const double gigabytes = static_cast<double>(flat_bytes.value) / 1e9;
  return {flat_bytes.value, gigabytes / gather, gigabytes / reduce, gigabytes / copy};
}

void report(const Request& request, const std::vector<Figures>& all) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Figures& f : all) {
    rows.push_back({{"bytes", f.bytes},
                    {"all_gather_gb_per_s", f.all_gather},
                    {"reduce_scatter_gb_per_s", f.reduce_scatter},
                    {"copy_gb_per_s", f.copy}});
  }
  const nlohmann::json json = {
      {"backend", request.backend}, {"ranks", request.ranks}, {"sizes", rows}};
  if (!request.json.empty()) std::ofstream(request.json) << json.dump(2) << '\n';
}

void run_rank(Collectives& c, const Request& request) {
  std::vector<Figures> all;
  if (c.rank() == 0) {
    fmt::print("{} on {} ranks\n{:>12} {:>18} {:>22} {:>12}\n", c.name(), c.world_size(), "size",
               "all_gather GB/s", "reduce_scatter GB/s", "copy GB/s");
  }
  for (std::int64_t mib = request.min_mib; mib <= request.max_mib; mib *= 4) {
    const Figures f = measure_size(c, mib, request.repetitions);
    all.push_back(f);
    if (c.rank() == 0) {
      fmt::print("{:>12} {:>18.2f} {:>22.2f} {:>12.2f}\n", to_string(Bytes(f.bytes)), f.all_gather,
                 f.reduce_scatter, f.copy);
    }
  }
  if (c.rank() == 0) report(request, all);
}

void run_threads(const Request& request) {
  LocalGroup group(request.ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < request.ranks; ++r) {
    threads.emplace_back([&, r] { run_rank(*group.rank(r), request); });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_one_process(int rank, const Request& request, const std::filesystem::path& directory) {
  FileBootstrap bootstrap(directory, rank, request.ranks, std::chrono::seconds(30));
  run_rank(*make_shm_collectives(bootstrap), request);
}

int run_processes(const Request& request) {
  std::string name = (std::filesystem::temp_directory_path() / "strata-bench-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw IoError("cannot make a directory: " + name);
  std::vector<pid_t> children;
  for (int r = 1; r < request.ranks; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      try {
        run_one_process(r, request, name);
        ::_exit(0);
      } catch (const std::exception& error) {
        fmt::print(stderr, "rank {}: {}\n", r, error.what());
        ::_exit(1);
      }
    }
    children.push_back(pid);
  }
  run_one_process(0, request, name);
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    failed += status == 0 ? 0 : 1;
  }
  std::filesystem::remove_all(name);
  return failed;
}

int run(const std::vector<std::string>& arguments) {
  const Request request = parse(arguments);
  if (request.backend == "shm") return run_processes(request);
  run_threads(request);
  return 0;
}

}  // namespace
}  // namespace strata::comm

int main(int argc, char** argv) {
  try {
    return strata::comm::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "strata_bench_comm: {}\n", error.what());
    return 1;
  }
}
