// The file behind the blocks of a store on a drive: one range of bytes that begins at 0 and grows.
// It is read and written at multiples of 4 KiB. The bytes lie in one file, or in several files on
// as many drives.
// Threads: one at a time. Ownership: the BlockFile outlives its transfers, as io::IoEngine
// requires. Errors: OutOfMemoryError from grow(); IoError from the transfers.
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/base/units.h"
#include "strata/io/io_engine.h"
#include "strata/offload/store_counts.h"
#include "strata/offload/swap_folder.h"

namespace strata::offload {

class BlockFile {
 public:
  virtual ~BlockFile() = default;
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
  virtual std::vector<DriveWrites> wear() const { return {}; }
};

// Makes a file at this path, which only its owner may read. Transfers bypass the page cache where
// the file system offers that.
std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           const std::string& path);
// Makes a file in folders of one or several drives; the folders are removed with the file. Where
// there are several drives, this measures each for a moment, and the faster drives get more of the
// bytes (io/striping.h).
std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           std::vector<std::unique_ptr<SwapFolder>> folders);

}  // namespace strata::offload
