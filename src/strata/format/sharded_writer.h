// Writes a model's tensors as a Hugging Face checkpoint folder: one model.safetensors, or shards of
// a largest size with model.safetensors.index.json. Byte ranges of tensors come in any order. Until
// finish() the folder's earlier checkpoint does not change, and a writer that is destroyed before
// leaves no trace. finish() first has every new file whole on disk under a temporary name; then an
// index whose shards are about to be overwritten goes, so that a crash within the renaming leaves a
// folder that says what it lacks and never a mix of two checkpoints; then come the names, the new
// index, and last the removal of what an earlier save left, in this form or in torch.save's.
//
// Threads: write() is internally synchronised, its Transfers belong to one thread each; the rest
// belongs to one thread. Ownership: borrows the engine, and the source of a write until its
// Transfer is waited for; a Transfer may outlive the writer; holds one file descriptor for each
// shard. Errors: UsageError for ranges that do not fit, overlap, or are missing at the end; IoError
// from the disk, also for a failed write whose Transfer was dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/format/safetensors.h"
#include "strata/io/io_engine.h"

namespace strata::format {

// Which parts of [0, size) have been claimed, when nothing may be claimed twice and in the end
// everything must have been. Threads: one thread. Units: whatever the caller counts.
struct Span1d {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const Span1d&) const = default;
};

class RangeCover {
 public:
  explicit RangeCover(std::int64_t size) : size_(size) {}

  // Claims the span (begin <= end, within the size). If a part of it was claimed before, claims
  // nothing and returns the first such part.
  std::optional<Span1d> claim(Span1d span);
  // The first part that was not claimed.
  std::optional<Span1d> first_gap() const;
  std::int64_t claimed() const { return claimed_; }
  std::int64_t size() const { return size_; }

 private:
  std::int64_t size_;
  std::int64_t claimed_ = 0;
  std::map<std::int64_t, std::int64_t> parts_;  // begin to end
};

// How a model's tensors are spread over files of a checkpoint folder: in their order, a new file
// whenever the next tensor would make the present one larger than allowed; a tensor larger than
// that has a file of its own. Names are those that Hugging Face readers look for. Pure; safe
// everywhere.
inline constexpr const char* kSingleFileName = "model.safetensors";
inline constexpr const char* kIndexFileName = "model.safetensors.index.json";

struct ShardPlan {
  std::vector<std::string> files;  // one: model.safetensors, or model-00001-of-0000N...
  std::vector<std::vector<std::size_t>> tensors;  // by file: indices into the list planned for
  Bytes total;                                    // of data

  bool sharded() const { return files.size() > 1; }
};

// UsageError if the limit is not positive or a tensor's size overflows.
ShardPlan plan_shards(std::span<const TensorSpec> tensors, Bytes shard_max);

// Is it a name of one of any number of shards, of safetensors or of torch.save?
bool is_shard_name(std::string_view file_name);

// Removes the weights of a model that an earlier save left in `folder`, but `ours`, in every form
// that readers look for: safetensors and files of torch.save, in one file or in shards with an
// index; also the temporary files of killed saves. A reader takes one form and never looks at the
// others, so it may load an older save that a new one leaves in place. Indexes go first, so that
// none refers to what is gone. Threads: any. Errors: IoError.
void remove_other_weights(const std::string& folder, const std::set<std::string>& ours);

struct ShardedWriterOptions {
  Bytes shard_max = 5'000'000'000_B;
  // transformers refuses files that do not say which framework's they are.
  Metadata metadata = {{"format", "pt"}};
};

class ShardedWriter {
 public:
  // Makes the folder if need be, takes the space of every shard and writes the headers.
  ShardedWriter(std::string folder, std::vector<TensorSpec> tensors, io::IoEngine& engine,
                const ShardedWriterOptions& options = {});
  ~ShardedWriter();

  const ShardPlan& plan() const { return plan_; }
  // Bytes [offset, offset + source.size()) of a tensor, by its place in the list declared.
  std::unique_ptr<io::Transfer> write(std::size_t tensor, Bytes offset,
                                      std::span<const std::byte> source);
  // Checks that every byte was written. All Transfers must have been waited for or destroyed.
  void finish();

 private:
  struct File;
  class TrackedTransfer;
  struct Place {
    std::size_t file = 0;
    std::size_t index = 0;  // within the file
  };
  std::string in_folder(const std::string& name) const { return folder_ + "/" + name; }
  std::string index_text() const;

  std::string folder_;
  std::vector<TensorSpec> tensors_;
  io::IoEngine& engine_;
  ShardPlan plan_;
  std::vector<Place> places_;  // by tensor
  std::vector<std::shared_ptr<File>> files_;
};

}  // namespace strata::format
