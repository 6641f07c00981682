// One file on a drive that takes its space before it is used. Threads: one. Ownership: owns the
// file and its folder; the folder is removed after the file. Errors: IoError; OutOfMemoryError from
// grow().
#pragma once

#include <memory>
#include <string>

#include "strata/base/units.h"
#include "strata/io/file.h"
#include "strata/io/io_engine.h"
#include "strata/offload/store_counts.h"
#include "strata/offload/swap_folder.h"

namespace strata::offload {

class DriveFile {
 public:
  // Makes the file, which only its owner may read. `folder`: null where another object keeps the
  // folder.
  DriveFile(const std::string& path, std::unique_ptr<SwapFolder> folder)
      : folder_(std::move(folder)), file_(io::File(path, io::File::Mode::kCreateNew).direct()) {}

  const io::File& file() const { return file_; }
  Bytes size() const { return size_; }

  // Takes space until the file has `size` bytes in all. When it throws, the file has the same space
  // as before.
  void grow(Bytes size);
  void note_written(Bytes bytes) { written_ += bytes; }
  // Counted for the folder that users named: the parent of the rank's own folder.
  DriveWrites wear() const;
  // Gives back the space beyond; no transfer is under way there.
  void shrink(Bytes size) noexcept;

 private:
  Bytes free_bytes() const;
  [[noreturn]] void refuse(Bytes more, Bytes free, int code) const;

  std::unique_ptr<SwapFolder> folder_;
  io::File file_;
  Bytes size_;
  Bytes written_;
};

// The bytes a second at which a drive reads and writes in turns, measured with some megabytes that
// the file has for a moment.
double measure_speed(DriveFile& drive, io::IoEngine& io);

}  // namespace strata::offload
