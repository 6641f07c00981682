#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "strata/base/error.h"
#include "strata/cli/commands.h"
#include "strata/format/safetensors.h"
#include "strata/io/folder_calls.h"
#include "strata/memory/host_buffer.h"
#include "strata/offload/block_file.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

using Medium = offload::FileSystem::Medium;

// A file of zeroes that has lost its name.
io::File make_file(const std::string& folder, Bytes bytes) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    throw UsageError("wanted a folder on the drive to measure; found none: path={}",
                     format::in_quotes(folder));
  const std::optional<Bytes> free = io::FolderCalls().free_space(folder);
  if (free && *free < bytes)
    throw UsageError(
        "the file to measure with does not fit; free some space, or give a smaller --size: path={} "
        "wanted={} free={}",
        format::in_quotes(folder), to_string(bytes), to_string(*free));
  const std::string name = io::temporary_name(folder + "/strata_bench_io");
  try {
    io::File file(name, io::File::Mode::kCreateNew);
    io::remove_file(name);
    file.reserve(bytes);
    return file.direct();
  } catch (const IoError& error) {
    throw UsageError(
        "no file can be made in the folder; give one that you may write to: path={}: {}",
        format::in_quotes(folder), error.what());
  }
}

// The number of blocks that wait for their turn, beyond those under way.
constexpr int kBlocksAhead = 2;
constexpr double kAsGood = 1.03;

enum class Pass { kRead, kWrite, kBoth };

void check(const DriveRequest& request) {
  const Bytes largest = *std::ranges::max_element(request.blocks);
  for (const Bytes block : request.blocks) {
    if (block % io::File::kDirectBlock != 0_B)
      throw UsageError("--block: wanted a multiple of {}, as drives want it; found {}",
                       to_string(io::File::kDirectBlock), block.value);
  }
  if (request.size < largest * 2)
    throw UsageError("--size: wanted two blocks of {} at least; found {}", to_string(largest),
                     request.size.value);
}

// One drive under measurement, by a file in a folder; past the page cache, where that is offered.
class DriveBench {
 public:
  // Takes the space at once.
  DriveBench(const DriveRequest& request, const std::string& path, std::span<std::byte> memory,
             Console& console)
      : request_(request),
        file_(make_file(path, request.size)),
        memory_(memory),
        console_(console),
        progress_(fmt::format("measuring {}", path),
                  request.size * static_cast<std::int64_t>(
                                     request.blocks.size() * request.depths.size() * 3 + 1),
                  console) {
    const auto [file_system, medium] = offload::file_system_of(path);
    // Newer kernels take O_DIRECT for files in memory, and copy all the same.
    const bool direct = file_.direct_fd() >= 0 && medium != Medium::kMemory;
    json_ = {{"path", path}, {"file_system", file_system}, {"direct", direct}};
    const bool is_network = medium == Medium::kNetwork;
    if (medium == Medium::kMemory) {
      remark(fmt::format("{} is memory: O_DIRECT is not offered, and no drive is measured",
                         file_system));
    } else if (!direct) {
      remark(fmt::format("{}O_DIRECT is not offered{}: figures are those of the page cache",
                         is_network ? file_system + " is a network file system, and " : "",
                         is_network ? "" : " by " + file_system));
    } else if (is_network) {
      remark(fmt::format("{} is a network file system", file_system));
    }
  }

  // Its report as JSON.
  Json run(std::vector<DriveFigures>& figures) {
    for (const Bytes block : request_.blocks) {
      for (const int depth : request_.depths) figures.push_back(cell(block, depth));
    }
    for (const DriveFigures& cell : figures)
      json_["figures"].push_back({{"block_size", cell.block.value},
                                  {"queue_depth", cell.depth},
                                  {"read_gb_per_s", cell.read},
                                  {"write_gb_per_s", cell.write},
                                  {"both_gb_per_s", cell.both}});
    json_["remarks"] = remarks_;
    return json_;
  }

 private:
  void remark(std::string text) { remarks_.push_back(std::move(text)); }

  DriveFigures cell(Bytes block, int depth) {
    const io::ChosenEngine chosen = io::make_io_engine(
        {.kind = request_.engine, .piece = block, .depth = depth, .threads = depth});
    io::IoEngine& io = *chosen.engine;
    const auto registration = io.register_memory(memory_);
    if (!json_.contains("engine")) {
      json_["engine"] = io.name();
      if (!chosen.refused.empty())
        remark(chosen.refused);
      else if (request_.engine != io::EngineKind::kThreads && !registration->refused().empty())
        remark("memory is not registered: " + registration->refused());
      pass(io, Pass::kWrite, block, depth);  // the file system gives each block its place
    }
    DriveFigures figures{block, depth};
    figures.write = pass(io, Pass::kWrite, block, depth);
    figures.read = pass(io, Pass::kRead, block, depth);
    figures.both = pass(io, Pass::kBoth, block, depth);
    return figures;
  }

  // GB/s.
  double pass(io::IoEngine& io, Pass what, Bytes block, int depth) {
    const Bytes used = block * (std::int64_t{kBlocksAhead} * depth);
    checkpoint::TransferRing ring(memory_.first(used.size()), block);
    const std::int64_t blocks = request_.size / block;
    const Clock::time_point start = console_.now();
    for (std::int64_t i = 0; i < blocks; ++i) {
      const std::size_t turn = ring.next();
      // Both: reads go over the first half, writes over the second.
      const bool reads = what == Pass::kRead || (what == Pass::kBoth && i % 2 == 0);
      const std::int64_t place = what == Pass::kBoth ? i / 2 + (reads ? 0 : (blocks + 1) / 2) : i;
      const auto memory = ring.buffer(turn);
      ring.started(turn, reads ? io.read(file_, block * place, memory)
                               : io.write(file_, block * place, memory));
      progress_.add(block);
    }
    ring.drain();
    const std::chrono::duration<double> seconds = console_.now() - start;
    return static_cast<double>((block * blocks).value) * 1e-9 / seconds.count();
  }

  const DriveRequest& request_;
  const io::File file_;
  const std::span<std::byte> memory_;
  Console& console_;
  Progress progress_;
  Json json_;
  std::vector<std::string> remarks_;
};

// Nanoseconds in which a byte is read and written.
double cost_of(const DriveFigures& figures) {
  return 1 / figures.read + 1 / figures.write;
}

}  // namespace

std::size_t best_of(const DriveSpeeds& drives) {
  const std::size_t count = drives.front().size();
  std::vector<double> losses(count, 0);
  for (const std::vector<DriveFigures>& drive : drives) {
    double least = std::numeric_limits<double>::infinity();
    for (const DriveFigures& figures : drive) least = std::min(least, cost_of(figures));
    for (std::size_t i = 0; i < count; ++i)
      losses[i] = std::max(losses[i], cost_of(drive[i]) / least);
  }
  const double good = *std::ranges::min_element(losses) * kAsGood;
  std::size_t best = count;
  const auto held = [&](std::size_t i) {
    const DriveFigures& figures = drives.front()[i];
    return figures.block * figures.depth;
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (losses[i] <= good && (best == count || held(i) < held(best))) best = i;
  }
  return best;
}

Report measure_drives(const DriveRequest& request, Console& console) {
  check(request);
  // Refuses what cannot be meant before there is anything to wait for.
  for (const std::string& path : request.paths) make_file(path, request.size);
  const std::int64_t blocks =
      std::int64_t{kBlocksAhead} * *std::ranges::max_element(request.depths);
  memory::HostBuffer memory(*std::ranges::max_element(request.blocks) * blocks);
  offload::fill_with_noise(memory.bytes());  // no drive compresses it
  DriveSpeeds speeds;
  Report report;
  for (const std::string& path : request.paths) {
    const Json json = DriveBench(request, path, memory.bytes(), console).run(speeds.emplace_back());
    report.json["drives"].push_back(json);
    report.text += fmt::format("{}: {}, {} the page cache, by {}, a file of {}\n", path,
                               json["file_system"].get<std::string>(),
                               json["direct"].get<bool>() ? "past" : "through",
                               json["engine"].get<std::string>(), to_string(request.size));
    TextTable table({"block", "depth", "read GB/s", "write GB/s", "both GB/s"});
    for (const DriveFigures& figures : speeds.back())
      table.add({to_string(figures.block), fmt::format("{}", figures.depth),
                 fmt::format("{:.2f}", figures.read), fmt::format("{:.2f}", figures.write),
                 fmt::format("{:.2f}", figures.both)});
    report.text += table.text();
    for (const Json& remark : json["remarks"])
      report.text += "- " + remark.get<std::string>() + "\n";
    report.text += "\n";
  }
  const DriveFigures& best = speeds.front()[best_of(speeds)];
  report.json["size"] = request.size.value;
  report.json["aio"] = {{"block_size", best.block.value}, {"queue_depth", best.depth}};
  report.text += fmt::format("in the configuration: \"aio\": {}\n", report.json["aio"].dump());
  return report;
}

}  // namespace strata::cli
