// The file behind the blocks of a store on a drive (BlockFile), and how fast its drives are. The
// bytes lie in one file, or in several files on as many drives.
//
// Threads: one at a time. Ownership: a BlockFile owns its files and their folders, and outlives its
// transfers, as io::IoEngine requires. Errors: OutOfMemoryError from grow(); IoError.
#pragma once

#include <sys/types.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/base/interface.h"
#include "strata/base/units.h"
#include "strata/io/file.h"
#include "strata/io/io_engine.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

// The file system of a folder, as statfs(2) tells it. An unknown one counts as a drive.
struct FileSystem {
  enum class Medium { kDrive, kMemory, kNetwork };
  std::string name = "unknown";  // "tmpfs"; "type 0x..." for one without a name here
  Medium medium = Medium::kDrive;
};
FileSystem file_system_of(const std::string& path);

// Some drives store zeroes without writing any, or compress what they can.
void fill_with_noise(std::span<std::byte> bytes);

// A rank's own folder for states on a drive, below a path that users name. It is private to its
// user, locked while its rank lives, and removed at the end. Two jobs may use one path; each makes
// its own folders. The next job of the same user removes the folders of killed jobs: a folder
// without a held lock has no owner any more. A network file system may not show locks of other
// hosts, so there a job removes only leftovers of its own host.
// Threads: one. Ownership: owns the folder; its users close their files in it first. Errors:
// IoError for an unusable path. A leftover that cannot be removed is no error.
class SwapFolder : NonCopyable {
 public:
  // `path`: an existing folder. Making it could fill another drive when the named one is not
  // mounted.
  SwapFolder(const std::string& path, int rank);
  ~SwapFolder();

  const std::string& path() const { return folder_; }  // its own, absolute

  const FileSystem& file_system() const { return file_system_; }
  // A message for users, shown once, if the path is not on a drive; empty otherwise.
  std::string warning() const;

 private:
  bool make(int rank);
  void remove_leftovers();
  void remove_leftover(const std::string& folder) const;

  std::string root_;
  std::string folder_;
  io::FileLock lock_;
  FileSystem file_system_;
  bool locks_ = true;  // whether the file system has them
  pid_t owner_ = 0;    // a process that was forked removes nothing
};

// One range of bytes that begins at 0 and grows. It is read and written at multiples of 4 KiB.
class BlockFile : public Interface {
 public:
  virtual const std::string& path() const = 0;  // the path that messages name
  // Takes space until the file has `size` bytes in all. When it throws, the file has the same space
  // as before. New space may hold any bytes.
  virtual void grow(Bytes size) = 0;
  virtual std::unique_ptr<io::Transfer> read(Bytes offset, std::span<std::byte> target) = 0;
  virtual std::unique_ptr<io::Transfer> write(Bytes offset, std::span<const std::byte> source) = 0;
  // Fills memory with the content of space that was never written.
  virtual void clear(std::span<std::byte> target) { std::memset(target.data(), 0, target.size()); }
  // Most transfers use this memory, which outlives the file: the file may register it with the I/O
  // engine.
  virtual void expect_memory(std::span<std::byte> /*memory*/) {}
  // One entry for each folder in which the file lies.
  virtual std::vector<DriveWrites> drive_writes() const { return {}; }
};

// Makes a file in folders of one or several drives; the folders are removed with the file. Only its
// owner may read it, and transfers bypass the page cache where the file system offers that. Where
// there are several drives, this measures each for a moment, and the faster drives get more of the
// bytes (io/striping.h).
std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           std::vector<std::unique_ptr<SwapFolder>> folders);

// Measures how fast a drive is: it writes 8 to 32 MiB past the end of the store's data and reads
// them back, with several transfers at once, as the store does. Reports compare a run's speed with
// the result. So the measurement takes only some hundredths of a second, and shows the drive's
// speed at that moment. A drive with a cache of its own, or with a budget for bursts, may not
// sustain it; and the share of other users is missing from it.
// Memory: some megabytes while it runs. Errors: OutOfMemoryError where the drive is full; IoError.
// `begin`: a multiple of 4 KiB. The file holds no data from there on.
DriveLimit measure_drive(BlockFile& file, Bytes begin);

}  // namespace strata::offload
