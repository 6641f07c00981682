// Writes the files of a training checkpoint, for saves of sharded training (engine/checkpoint) and
// importers. A FileLayout says which bytes lie where; a Source brings them through a ring; a
// FileWriter computes the checksums on the way and writes whole blocks past the page cache: no
// program reads a checkpoint soon, and a copy in the cache costs memory and a core's time.
//
// Threads: one. Ownership: borrows layouts, sources, the I/O engine and the calls; owns the files.
// Errors: UsageError for names that no safetensors file can hold; IoError.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/checkpoint/folder.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/format/manifest.h"
#include "strata/io/folder_calls.h"
#include "strata/io/io_engine.h"

namespace strata::checkpoint {

// Elements [begin, end) of a tensor of the manifest.
struct TensorRange {
  std::size_t tensor = 0;
  std::string name;  // in the file; a kind other than a value goes before it
  std::string kind;
  DType dtype = DType::kFloat32;
  Numel begin;
  Numel end;
  std::vector<std::int64_t> shape = {};  // in the file
  // Where the caller has the first element: in its memory, or else in a shard of its own.
  const std::byte* memory = nullptr;
  int shard = 0;
  Numel shard_offset = {};
};

// A safetensors file as it will be. Immutable.
class FileLayout {
 public:
  FileLayout(std::string name, std::vector<TensorRange> parts);

  const std::string& name() const { return name_; }
  Bytes bytes() const { return bytes_; }
  // In the order of the file.
  const std::vector<TensorRange>& parts() const { return parts_; }
  // The same, `file` being its place in a manifest. Numbers of kinds are places in `kinds`.
  std::vector<format::ManifestRange> extents(std::span<const std::string> kinds,
                                             std::size_t file) const;

  // Brings bytes [at, at + target.size()) of a part, or begins to.
  using FillPart = std::function<void(std::size_t part, Bytes at, std::span<std::byte> target)>;
  // Fills `target` with the file's bytes from `offset` on. The host writes the header at once.
  void fill(Bytes offset, std::span<std::byte> target, const FillPart& fill_part) const;

 private:
  std::string name_;
  std::string head_;
  Bytes bytes_;
  std::vector<TensorRange> parts_;  // by offset
  std::vector<Bytes> offsets_;      // of the parts
};

// A whole file, in pieces of one size. `fill` brings the bytes from an offset on, at once or on the
// stream.
class WholeFile final : public Source {
 public:
  using Fill = std::function<void(Bytes offset, std::span<std::byte> target)>;
  WholeFile(Bytes file, Bytes piece, Fill fill, device::Stream* stream = nullptr)
      : file_(file), most_(piece), fill_(std::move(fill)), stream_(stream) {}
  bool next(Piece& piece) override;
  device::Stream* stream() override { return stream_; }
  std::unique_ptr<io::Transfer> fill(Piece& piece, std::span<std::byte>) override {
    fill_(piece.offset, piece.content);
    return nullptr;
  }

 private:
  Bytes file_;
  Bytes most_;
  Fill fill_;
  device::Stream* stream_;
  Bytes at_;
};

// The files of one rank. The constructor makes all and takes their space: a full disk is an error
// before the first byte.
class FileWriter : NonCopyable {
 public:
  FileWriter(const std::string& folder, std::span<const FileLayout> layouts, io::IoEngine& io,
             io::FolderCalls& calls);
  ~FileWriter();

  // Writes the next file, in order, and brings it to disk. Buffers of the ring are whole blocks of
  // checksums (blocks_of()).
  void write(Source& source, TransferRing& ring);
  // The files and extents, for a manifest with these kinds. Once.
  format::RankManifest finish(std::span<const std::string> kinds);

 private:
  struct File;
  io::FolderCalls& calls_;
  std::span<const FileLayout> layouts_;
  std::vector<std::unique_ptr<File>> files_;  // null: written
  format::RankManifest part_;
};

// The smallest multiple of `buffer` that is whole blocks of checksums of all the files.
Bytes blocks_of(Bytes buffer, std::span<const FileLayout> layouts);

// A tensor that is written whole, and as what it is stored: format::kValue first.
struct WholeTensor {
  format::ManifestTensor tensor;
  std::vector<std::pair<std::string, DType>> kinds;  // all have the tensor's shape
};

struct WholeCheckpoint {
  std::string folder;
  std::string tag;
  std::vector<WholeTensor> tensors;
  std::string training = "{}";  // JSON, as Manifest has it
  int world_size = 1;           // of the run that the tensors come from, and its stage
  int stage = 0;
  NewCheckpointOptions publish;
};

// All bytes of tensors[tensor].kinds[kind], on the host; they stay until the next call.
using ReadWhole = std::function<std::span<const std::byte>(std::size_t tensor, std::size_t kind)>;

// Writes a checkpoint of tensors that are whole, as importers have them: asks for one after the
// other, in the order of the files, model-00000-of-00001.safetensors and, where something is kept
// beside values, optimizer-00000-of-00001.safetensors. An error leaves the folder as it was.
// UsageError for a tag that is no name, and for bytes of another size than was declared.
void write_whole(const WholeCheckpoint& checkpoint, const ReadWhole& read, io::IoEngine& io,
                 io::FolderCalls& calls);

}  // namespace strata::checkpoint
