#include "strata/cli/drive_folder.h"

#include <fmt/core.h>
#include <linux/magic.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"
#include "strata/io/folder_calls.h"

namespace strata::cli {
namespace {

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
    throw UsageError(fmt::format(
        "the file to measure with does not fit; free some space, or give a smaller --size: path={} "
        "wanted={} free={}",
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

}  // namespace

DriveFolder::DriveFolder(std::string path, Bytes bytes)
    : path_(std::move(path)), file_(make_file(path_, bytes)) {
  const auto [name, medium] = file_system_of(path_);
  file_system_ = name;
  is_memory_ = medium == Medium::kMemory;
  is_network_ = medium == Medium::kNetwork;
}

// Newer kernels take O_DIRECT for files in memory, and copy all the same.
bool DriveFolder::direct() const {
  return file_.direct_fd() >= 0 && !is_memory_;
}

std::string DriveFolder::remark() const {
  if (is_memory_) {
    return fmt::format("{} is memory: O_DIRECT is not offered, and no drive is measured",
                       file_system_);
  }
  if (direct()) return is_network_ ? fmt::format("{} is a network file system", file_system_) : "";
  return fmt::format("{}O_DIRECT is not offered{}: figures are those of the page cache",
                     is_network_ ? file_system_ + " is a network file system, and " : "",
                     is_network_ ? "" : fmt::format(" by {}", file_system_));
}

}  // namespace strata::cli
