// One file on a drive whose space is taken before it is used. Threads: one. Ownership: owns the
// file, and its folder, which goes after it. Errors: IoError; OutOfMemoryError from grow().
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
  // Makes it; only its owner may read it. `folder`: null where somebody else keeps it.
  DriveFile(const std::string& path, std::unique_ptr<SwapFolder> folder)
      : folder_(std::move(folder)), file_(io::File(path, io::File::Mode::kCreateNew).direct()) {}

  const io::File& file() const { return file_; }
  Bytes size() const { return size_; }

  // Takes the space of so many bytes in all, or throws and has what it had.
  void grow(Bytes size);
  void note_written(Bytes bytes) { written_ += bytes; }
  // By the folder that users named: the one that a folder of its own is in.
  DriveWear wear() const;
  // Gives back what is beyond; nothing is under way there.
  void shrink(Bytes size) noexcept;

 private:
  Bytes free_bytes() const;
  [[noreturn]] void refuse(Bytes more, Bytes free, int code) const;

  std::unique_ptr<SwapFolder> folder_;
  io::File file_;
  Bytes size_;
  Bytes written_;
};

// Bytes a second at which a drive reads and writes in turns, from some megabytes that the file has
// for a moment.
double measure_speed(DriveFile& drive, io::IoEngine& io);

}  // namespace strata::offload
