// Seam: positional reads and writes. Implementations: thread_engine (pread/pwrite on a pool); io_uring
// later.
//
// A transfer is complete or it failed: short transfers are continued, EINTR is retried, and whatever
// remains surfaces as IoError (path, offset, wanted, got, errno) from wait(). Reading past the end of the
// file is an IoError, not a short read.
// Threads: internally synchronised; transfers of one engine run in no particular order, so two that
// overlap in file or memory must be separated by wait().
// Ownership: the File and the memory must outlive the Transfer's wait(). ~Transfer waits and drops errors.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "strata/base/units.h"

namespace strata::io {

// An open file descriptor with its path. Movable; closed by the destructor.
class File {
 public:
  enum class Mode { kRead, kCreate, kReadWrite };  // kCreate truncates
  File(std::string path, Mode mode);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  Bytes size() const;
  // Takes the space now, so that a full disk is an error before the first byte is written.
  void reserve(Bytes bytes);
  void sync();  // fsync

 private:
  std::string path_;
  int fd_ = -1;
};

class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;  // throws IoError
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual std::string_view name() const = 0;
  virtual std::unique_ptr<Transfer> read(const File& file, Bytes offset, std::span<std::byte> target) = 0;
  virtual std::unique_ptr<Transfer> write(const File& file, Bytes offset,
                                          std::span<const std::byte> source) = 0;
};

}  // namespace strata::io
