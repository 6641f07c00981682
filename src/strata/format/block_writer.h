// Writes a file from its first byte to its last in blocks of a checkpoint's checksums, which it
// computes on the way. It writes past the page cache what lies at blocks in memory
// (io::File::kDirectBlock): nobody reads a checkpoint soon, and a copy in the cache costs memory
// and a core's time. Threads: one. Ownership: borrows the engine and the calls; owns the file.
// Errors: IoError; UsageError for blocks out of order.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "strata/format/manifest.h"
#include "strata/io/folder_calls.h"
#include "strata/io/io_engine.h"

namespace strata::format {

class BlockWriter {
 public:
  // Makes the file and takes its space: a full disk is an error before the first byte.
  BlockWriter(const std::string& folder, std::string name, Bytes bytes, io::IoEngine& io,
              io::FolderCalls& calls);

  // The next bytes: whole blocks, or up to the end. They stay until the transfer has ended.
  std::unique_ptr<io::Transfer> write(std::span<const std::byte> bytes);
  Bytes block() const { return entry_.checksums.block(); }
  Bytes written() const { return written_; }
  // All transfers have ended, and the file is complete: brings it to disk.
  ManifestFile finish();

 private:
  io::IoEngine& io_;
  io::FolderCalls& calls_;
  ManifestFile entry_;
  io::File file_;
  Bytes written_;
};

}  // namespace strata::format
