#include "strata/cli/bench_io.h"

#include <fmt/core.h>
#include <linux/magic.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "strata/base/error.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/format/safetensors.h"
#include "strata/io/folder_calls.h"
#include "strata/io/io_engine.h"
#include "strata/memory/host_buffer.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

enum class Medium { kDrive, kMemory, kNetwork };

struct FileSystem {
  std::uint32_t magic;
  const char* name;
  Medium medium;
};

constexpr std::array kFileSystems{
    FileSystem{EXT4_SUPER_MAGIC, "ext4", Medium::kDrive},
    FileSystem{XFS_SUPER_MAGIC, "xfs", Medium::kDrive},
    FileSystem{BTRFS_SUPER_MAGIC, "btrfs", Medium::kDrive},
    FileSystem{F2FS_SUPER_MAGIC, "f2fs", Medium::kDrive},
    FileSystem{OVERLAYFS_SUPER_MAGIC, "overlay", Medium::kDrive},
    FileSystem{0x2FC12FC1, "zfs", Medium::kDrive},
    FileSystem{TMPFS_MAGIC, "tmpfs", Medium::kMemory},
    FileSystem{RAMFS_MAGIC, "ramfs", Medium::kMemory},
    FileSystem{NFS_SUPER_MAGIC, "nfs", Medium::kNetwork},
    FileSystem{CIFS_SUPER_MAGIC, "cifs", Medium::kNetwork},
    FileSystem{SMB2_SUPER_MAGIC, "smb", Medium::kNetwork},
    FileSystem{CEPH_SUPER_MAGIC, "ceph", Medium::kNetwork},
    FileSystem{V9FS_MAGIC, "9p", Medium::kNetwork},
    FileSystem{FUSE_SUPER_MAGIC, "fuse", Medium::kNetwork},
    FileSystem{0x0BD00BD0, "lustre", Medium::kNetwork},
    FileSystem{0x47504653, "gpfs", Medium::kNetwork},
};

std::pair<std::string, Medium> file_system_of(const std::string& path) {
  struct statfs status {};
  if (::statfs(path.c_str(), &status) != 0) return {"unknown", Medium::kDrive};
  const auto magic = static_cast<std::uint32_t>(status.f_type);
  for (const FileSystem& system : kFileSystems) {
    if (system.magic == magic) return {system.name, system.medium};
  }
  return {fmt::format("type {:#x}", magic), Medium::kDrive};
}

// A file of zeroes that has lost its name.
io::File make_file(const std::string& folder, Bytes bytes) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) {
    throw UsageError(fmt::format("wanted a folder on the drive to measure; found none: path={}",
                                 format::in_quotes(folder)));
  }
  struct statvfs status {};
  if (::statvfs(folder.c_str(), &status) == 0 &&
      static_cast<double>(status.f_bavail) * static_cast<double>(status.f_frsize) <
          static_cast<double>(bytes.value)) {
    throw UsageError(
        fmt::format("the file to measure with does not fit; free some space, or give a smaller "
                    "--size: path={} wanted={} free={}",
                    format::in_quotes(folder), to_string(bytes),
                    to_string(Bytes(status.f_bavail * status.f_frsize))));
  }
  const std::string name = io::temporary_name(folder + "/strata_bench_io");
  try {
    io::File file(name, io::File::Mode::kCreateNew);
    io::remove_file(name);
    file.reserve(bytes);
    return file.direct();
  } catch (const IoError& error) {
    throw UsageError(fmt::format(
        "no file can be made in the folder; give one that you may write to: path={}: {}",
        format::in_quotes(folder), error.what()));
  }
}

// A folder whose drive is to be measured, and the file; past the page cache, where that is offered.
class DriveFolder {
 public:
  // Takes the space at once.
  DriveFolder(std::string path, Bytes bytes)
      : path_(std::move(path)), file_(make_file(path_, bytes)) {
    std::tie(file_system_, medium_) = file_system_of(path_);
  }

  const std::string& path() const { return path_; }
  const std::string& file_system() const { return file_system_; }  // "ext4"
  const io::File& file() const { return file_; }
  // Newer kernels take O_DIRECT for files in memory, and copy all the same.
  bool direct() const { return file_.direct_fd() >= 0 && medium_ != Medium::kMemory; }
  // A remark on the figures; empty: none.
  std::string remark() const {
    const bool is_network = medium_ == Medium::kNetwork;
    if (medium_ == Medium::kMemory) {
      return fmt::format("{} is memory: O_DIRECT is not offered, and no drive is measured",
                         file_system_);
    }
    if (direct()) return is_network ? fmt::format("{} is a network file system", file_system_) : "";
    return fmt::format("{}O_DIRECT is not offered{}: figures are those of the page cache",
                       is_network ? file_system_ + " is a network file system, and " : "",
                       is_network ? "" : fmt::format(" by {}", file_system_));
  }

 private:
  std::string path_;
  std::string file_system_;
  Medium medium_ = Medium::kDrive;
  io::File file_;
};

// The number of blocks that wait for their turn, beyond those under way.
constexpr int kBlocksAhead = 2;
constexpr double kAsGood = 1.03;

enum class Pass { kRead, kWrite, kBoth };

Bytes memory_for(const DriveRequest& request) {
  return *std::ranges::max_element(request.blocks) *
         (std::int64_t{kBlocksAhead} * *std::ranges::max_element(request.depths));
}

void check(const DriveRequest& request) {
  const Bytes largest = *std::ranges::max_element(request.blocks);
  for (const Bytes block : request.blocks) {
    if (block % io::File::kDirectBlock != 0_B) {
      throw UsageError(fmt::format("--block: wanted a multiple of {}, as drives want it; found {}",
                                   to_string(io::File::kDirectBlock), block.value));
    }
  }
  if (request.size < largest * 2) {
    throw UsageError(fmt::format("--size: wanted two blocks of {} at least; found {}",
                                 to_string(largest), request.size.value));
  }
}

// Bytes that no drive compresses. Whole words: `bytes` are blocks.
void fill(std::span<std::byte> bytes) {
  std::uint64_t state = 88172645463325252U;
  for (std::size_t at = 0; at < bytes.size(); at += sizeof state) {
    state ^= state << 13U;
    state ^= state >> 7U;
    state ^= state << 17U;
    std::memcpy(bytes.data() + at, &state, sizeof state);
  }
}

// One drive under measurement.
class DriveBench {
 public:
  DriveBench(const DriveRequest& request, const std::string& path, std::span<std::byte> memory,
             Console& console)
      : request_(request), folder_(path, request.size), memory_(memory), console_(console) {}

  DriveSpeed run() {
    DriveSpeed speed{folder_.path(), folder_.file_system(), folder_.direct(), "", {}, {}};
    if (const std::string remark = folder_.remark(); !remark.empty())
      speed.remarks.push_back(remark);
    const std::size_t cells = request_.blocks.size() * request_.depths.size();
    Progress progress(fmt::format("measuring {}", folder_.path()),
                      request_.size * static_cast<std::int64_t>(cells * 3 + 1), console_);
    progress_ = &progress;
    for (const Bytes block : request_.blocks) {
      for (const int depth : request_.depths) speed.figures.push_back(cell(block, depth, speed));
    }
    return speed;
  }

 private:
  DriveFigures cell(Bytes block, int depth, DriveSpeed& speed) {
    const io::ChosenEngine chosen = io::make_io_engine(
        {.kind = request_.engine, .piece = block, .depth = depth, .threads = depth});
    io::IoEngine& io = *chosen.engine;
    const auto registration = io.register_memory(memory_);
    const bool first = speed.figures.empty();
    if (first) {
      speed.engine = io.name();
      if (!chosen.refused.empty()) speed.remarks.push_back(chosen.refused);
      if (chosen.refused.empty() && request_.engine != io::EngineKind::kThreads &&
          !registration->refused().empty())
        speed.remarks.push_back("memory is not registered: " + registration->refused());
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
      ring.started(turn, reads ? io.read(folder_.file(), block * place, memory)
                               : io.write(folder_.file(), block * place, memory));
      progress_->add(block);
    }
    ring.drain();
    const std::chrono::duration<double> seconds = console_.now() - start;
    return static_cast<double>((block * blocks).value) * 1e-9 / seconds.count();
  }

  const DriveRequest& request_;
  const DriveFolder folder_;
  const std::span<std::byte> memory_;
  Console& console_;
  Progress* progress_ = nullptr;
};

// Nanoseconds in which a byte is read and written.
double cost_of(const DriveFigures& figures) {
  return 1 / figures.read + 1 / figures.write;
}

Json section_of(const DriveSpeeds& speeds) {
  const DriveFigures& best = speeds.drives.front().figures[speeds.best];
  return {{"block_size", best.block.value}, {"queue_depth", best.depth}};
}

}  // namespace

std::size_t best_of(const std::vector<DriveSpeed>& drives) {
  const std::size_t count = drives.front().figures.size();
  std::vector<double> losses(count, 0);
  for (const DriveSpeed& drive : drives) {
    double least = std::numeric_limits<double>::infinity();
    for (const DriveFigures& figures : drive.figures) least = std::min(least, cost_of(figures));
    for (std::size_t i = 0; i < count; ++i)
      losses[i] = std::max(losses[i], cost_of(drive.figures[i]) / least);
  }
  const double good = *std::ranges::min_element(losses) * kAsGood;
  std::size_t best = count;
  const auto held = [&](std::size_t i) {
    const DriveFigures& figures = drives.front().figures[i];
    return figures.block * figures.depth;
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (losses[i] <= good && (best == count || held(i) < held(best))) best = i;
  }
  return best;
}

DriveSpeeds measure_drives(const DriveRequest& request,
                           const std::shared_ptr<memory::Ledger>& ledger, Console& console) {
  check(request);
  // Refuses what cannot be meant before there is anything to wait for.
  for (const std::string& path : request.paths) const DriveFolder tried(path, request.size);
  memory::HostBuffer memory(memory_for(request), {.ledger = ledger});
  fill(memory.bytes());
  DriveSpeeds speeds{request.size, {}, 0};
  for (const std::string& path : request.paths)
    speeds.drives.push_back(DriveBench(request, path, memory.bytes(), console).run());
  speeds.best = best_of(speeds.drives);
  return speeds;
}

std::string text_of(const DriveSpeeds& speeds) {
  std::string text;
  for (const DriveSpeed& drive : speeds.drives) {
    text += fmt::format("{}: {}, {} the page cache, by {}, a file of {}\n", drive.path,
                        drive.file_system, drive.direct ? "past" : "through", drive.engine,
                        to_string(speeds.size));
    TextTable table({"block", "depth", "read GB/s", "write GB/s", "both GB/s"});
    for (const DriveFigures& figures : drive.figures) {
      table.add({to_string(figures.block), fmt::format("{}", figures.depth),
                 fmt::format("{:.2f}", figures.read), fmt::format("{:.2f}", figures.write),
                 fmt::format("{:.2f}", figures.both)});
    }
    text += table.text();
    for (const std::string& remark : drive.remarks) text += "- " + remark + "\n";
    text += "\n";
  }
  return text + fmt::format("in the configuration: \"aio\": {}\n", section_of(speeds).dump());
}

Json json_of(const DriveSpeeds& speeds) {
  Json drives = Json::array();
  for (const DriveSpeed& drive : speeds.drives) {
    Json figures = Json::array();
    for (const DriveFigures& cell : drive.figures) {
      figures.push_back({{"block_size", cell.block.value},
                         {"queue_depth", cell.depth},
                         {"read_gb_per_s", cell.read},
                         {"write_gb_per_s", cell.write},
                         {"both_gb_per_s", cell.both}});
    }
    drives.push_back({{"path", drive.path},
                      {"file_system", drive.file_system},
                      {"direct", drive.direct},
                      {"engine", drive.engine},
                      {"remarks", drive.remarks},
                      {"figures", figures}});
  }
  return {{"size", speeds.size.value}, {"drives", drives}, {"aio", section_of(speeds)}};
}

}  // namespace strata::cli
