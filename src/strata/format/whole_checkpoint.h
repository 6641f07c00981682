// Writes a checkpoint of training (manifest.h) from tensors that are whole, one after the other, as
// an importer of another library's checkpoints has them. All tensors are declared first; then the
// bytes of each come in the order of the files, so that no more than one tensor and two small
// buffers are held. As from one rank's shards there are two files:
// model-00000-of-00001.safetensors and, where something is kept beside values,
// optimizer-00000-of-00001.safetensors.
//
// Threads: one. Ownership: borrows the engine and the calls. Errors: UsageError for tensors that no
// file can hold, a tag that is no name, bytes of another size than was declared and for publishing
// before all came; IoError. Whatever stops before publish() leaves the folder as it was.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/format/checkpoint_folder.h"
#include "strata/format/manifest.h"
#include "strata/io/folder_calls.h"
#include "strata/io/io_engine.h"

namespace strata::format {

struct WholeTensor {
  ManifestTensor tensor;
  // What is stored of it, and as what: kValue first. All have the tensor's shape.
  std::vector<std::pair<std::string, DType>> kinds;
};

// What the writer wants next: tensors[tensor].kinds[kind], so many bytes.
struct WholePiece {
  std::size_t tensor = 0;
  std::size_t kind = 0;
  Bytes bytes;
  bool operator==(const WholePiece&) const = default;
};

class WholeCheckpointWriter {
 public:
  // Takes the folder's lock and the files' space.
  WholeCheckpointWriter(std::string folder, std::string tag, std::vector<WholeTensor> tensors,
                        io::IoEngine& io, io::FolderCalls& calls);
  ~WholeCheckpointWriter();
  WholeCheckpointWriter(const WholeCheckpointWriter&) = delete;
  WholeCheckpointWriter& operator=(const WholeCheckpointWriter&) = delete;

  // Without tensors that have no elements: there is nothing to write of these.
  const std::vector<WholePiece>& order() const { return order_; }
  // All bytes of the next piece of order(). They are copied.
  void write(std::span<const std::byte> bytes);
  // A small file beside the tensors.
  void write_text(const std::string& name, std::string_view text);

  struct Description {
    std::string training = "{}";  // JSON, as Manifest has it
    int world_size = 1;           // of the run that the tensors come from, and its stage
    int stage = 0;
    NewCheckpointOptions publish;
  };
  // All pieces were written.
  void publish(const Description& description);

 private:
  class File;
  void plan(std::string name, bool values);

  std::vector<WholeTensor> tensors_;
  io::IoEngine& io_;
  io::FolderCalls& calls_;
  Manifest manifest_;
  std::vector<WholePiece> order_;
  std::size_t next_ = 0;  // of order_
  NewCheckpoint checkpoint_;
  std::vector<std::unique_ptr<File>> files_;
  std::size_t file_ = 0;  // that is being written
};

}  // namespace strata::format
