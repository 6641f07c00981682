// A checkpoint that was opened to be loaded: what is in it, and in what it differs from a model.
//
// Threads: immutable after construction; safe everywhere. Errors: FormatError for what is damaged,
// by file, tensor and place; IoError for files that are missing.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/engine/engine.h"
#include "strata/format/manifest.h"
#include "strata/io/io_engine.h"

namespace strata::engine {

// An open checkpoint, the same on every rank. Immutable.
class TrainingCheckpoint {
 public:
  // `path`: of its folder.
  TrainingCheckpoint(std::string path, format::Manifest manifest);

  const std::string& path() const { return path_; }
  const format::Manifest& manifest() const { return manifest_; }
  // By its name or an alias; nullopt: it has none.
  std::optional<std::size_t> find(format::TensorRole role, const std::string& name) const;
  // The tensor's extents of that kind, by their places in the manifest; empty: it has none.
  const std::vector<std::size_t>& extents(std::size_t tensor, std::string_view kind) const;
  bool has(std::size_t tensor, std::string_view kind) const {
    return !extents(tensor, kind).empty();
  }

 private:
  std::string path_;
  format::Manifest manifest_;
  std::map<std::pair<format::TensorRole, std::string>, std::size_t> by_name_;
  std::map<std::pair<std::size_t, std::string>, std::vector<std::size_t>, std::less<>> extents_;
  std::vector<std::size_t> none_;
};

// Collective. `path`: rank 0's counts; it reads the manifest for all.
TrainingCheckpoint open_training(comm::Collectives& collectives, const std::string& path);

// A persistent buffer of this rank's model.
struct BufferSpec {
  std::string name;
  std::vector<std::int64_t> shape;
};

// Parameters, or buffers, that only one of model and checkpoint has, or that differ in shape.
struct UnlikeNames {
  std::vector<std::string> missing;     // that the checkpoint lacks
  std::vector<std::string> unexpected;  // that the model lacks
  std::vector<std::string> misshapen;   // "name: [2, 3] in the model, [3, 2] in the checkpoint"
  bool none() const { return missing.empty() && unexpected.empty() && misshapen.empty(); }
};
UnlikeNames compare(const TrainingCheckpoint& checkpoint, Engine& engine);
// The buffers of `rank` of `world_size`, all of them.
UnlikeNames compare_buffers(const TrainingCheckpoint& checkpoint,
                            std::span<const BufferSpec> buffers, int rank, int world_size);
// Which tensor a rank's buffer goes on from: its own where the same number of ranks saved and this
// one's differed, else rank 0's; nullopt: there is none.
std::optional<std::size_t> find_buffer(const TrainingCheckpoint& checkpoint,
                                       const std::string& name, int rank, int world_size);

// Fills `target` with all bytes of a tensor's kind, verified, in the order of its dimensions,
// whatever the files have. It has as many as whole_bytes() says: 0 where there are none. Not
// collective. Memory: some blocks.
void read_whole(const TrainingCheckpoint& checkpoint, std::size_t tensor, io::IoEngine& io,
                std::span<std::byte> target, std::string_view kind = format::kValue);
// The same for a state in 8 bits, whose codes and scales become numbers.
void read_decoded(const TrainingCheckpoint& checkpoint, std::size_t tensor, io::IoEngine& io,
                  std::span<float> target, const std::string& kind);
Bytes whole_bytes(const TrainingCheckpoint& checkpoint, std::size_t tensor,
                  std::string_view kind = format::kValue);

}  // namespace strata::engine
