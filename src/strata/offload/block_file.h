// What lies behind the blocks of a store on a drive: one range of bytes from 0 on that grows and is
// read and written at multiples of 4 KiB. One file; several as one are another implementation.
// Threads: one at a time. Ownership: the BlockFile outlives its transfers, as io::IoEngine says.
// Errors: OutOfMemoryError from grow(); IoError from the transfers.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/base/units.h"
#include "strata/io/io_engine.h"
#include "strata/offload/swap_folder.h"

namespace strata::offload {

// What was written to a folder since the start, whoever asked for it: what its drive wears by.
struct DriveWear {
  std::string folder;
  Bytes written;
};

class BlockFile {
 public:
  virtual ~BlockFile() = default;
  virtual const std::string& path() const = 0;  // what messages call it
  // Takes the space of so many bytes in all, or throws and has what it had. What comes with it may
  // hold anything.
  virtual void grow(Bytes size) = 0;
  virtual std::unique_ptr<io::Transfer> read(Bytes offset, std::span<std::byte> target) = 0;
  virtual std::unique_ptr<io::Transfer> write(Bytes offset, std::span<const std::byte> source) = 0;
  // Of each folder that it lies in.
  virtual std::vector<DriveWear> wear() const { return {}; }
};

// A new file of this path, which only its owner may read; past the page cache where the file
// system offers that.
std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           const std::string& path);
// In a folder that goes with it.
std::unique_ptr<BlockFile> make_block_file(std::shared_ptr<io::IoEngine> io,
                                           std::unique_ptr<SwapFolder> folder);

}  // namespace strata::offload
