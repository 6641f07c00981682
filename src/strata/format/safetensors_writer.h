// Writes a safetensors file in pieces: all tensors are declared first, then byte ranges of them
// come in any order. The file is written beside its final name and takes that name only when every
// byte has been written exactly once and has reached the disk; whatever stops before that leaves no
// trace. Threads: write() is internally synchronised, its Transfers belong to one thread each; the
// rest belongs to one thread. Ownership: borrows the engine, and the source of a write until its
// Transfer is waited for; a Transfer may outlive the writer. Errors: UsageError for ranges that do
// not fit, overlap, or are missing at the end; IoError from the disk, also for a failed write whose
// Transfer was dropped.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/format/tensor_info.h"
#include "strata/io/io_engine.h"

namespace strata::format {

class SafetensorsWriter {
 public:
  // Takes the whole space and writes the header.
  SafetensorsWriter(std::string path, std::span<const TensorSpec> tensors, const Metadata& metadata,
                    io::IoEngine& engine);
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;

  const std::string& path() const;
  // As declared, now with their places in the file.
  const std::vector<TensorInfo>& tensors() const;
  // Bytes [offset, offset + source.size()) of a tensor, by its place in the list declared.
  std::unique_ptr<io::Transfer> write(std::size_t tensor, Bytes offset,
                                      std::span<const std::byte> source);

  // Checks that every byte was written and brings the file to disk, not yet under its name. All
  // Transfers must have been waited for or destroyed.
  void seal();
  // Gives the sealed file its name.
  void publish();
  void finish() {
    seal();
    publish();
  }

 private:
  struct State;
  class TrackedTransfer;
  std::shared_ptr<State> state_;
};

}  // namespace strata::format
