// What lies behind the blocks of a store on a drive: one range of bytes from 0 on that grows and is
// read and written at multiples of 4 KiB. In one file, or in several, on as many drives.
// Threads: one at a time. Ownership: the BlockFile outlives its transfers, as io::IoEngine says.
// Errors: OutOfMemoryError from grow(); IoError from the transfers.
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
  virtual const std::string& path() const = 0;  // what messages call it
  // Takes the space of so many bytes in all, or throws and has what it had. What comes with it may
  // hold anything.
  virtual void grow(Bytes size) = 0;
  virtual std::unique_ptr<io::Transfer> read(Bytes offset, std::span<std::byte> target) = 0;
  virtual std::unique_ptr<io::Transfer> write(Bytes offset, std::span<const std::byte> source) = 0;
  // Makes memory what a read of space that was never written stands for.
  virtual void clear(std::span<std::byte> target) { std::memset(target.data(), 0, target.size()); }
  // Most transfers go to and from this memory, which outlives the file: it may be registered with
  // the I/O engine.
  virtual void expect_memory(std::span<std::byte> /*memory*/) {}
  // Of each folder that it lies in.
  virtual std::vector<DriveWear> wear() const { return {}; }
};

// A new file of this path, which only its owner may read; past the page cache where the file
// system offers that.
std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           const std::string& path);
// In folders that go with it, of one or several drives. Of several each is measured for a moment,
// and the faster ones get more of the bytes (io/striping.h).
std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           std::vector<std::unique_ptr<SwapFolder>> folders);

}  // namespace strata::offload
