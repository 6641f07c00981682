// The manifest of a training checkpoint: what was saved, in which bytes of which file, and the
// checksum of every block. It is written last; a folder without one is no checkpoint.
//
//   DIR/latest                                   the tag of the newest checkpoint
//   DIR/TAG/manifest.json                        this
//   DIR/TAG/model-00000-of-00004.safetensors     values: of what is trained the fp32 masters, of
//                                                the rest what the model holds; buffers
//   DIR/TAG/optimizer-00000-of-00004.safetensors what the optimizer keeps of each value
//
// A rank writes its own shard, so a tensor of the model is the sum of its extents, runs of elements
// in any of the files. Ranks that load read the byte ranges that their own shards need, whatever
// world size, stage and placement saved them.
//
// Values; safe everywhere. Errors: FormatError, which names the file and what is wrong in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/units.h"

namespace strata::format {

// XXH3 of 64 bits, and its 16 hexadecimal digits.
std::uint64_t checksum_of(std::span<const std::byte> bytes);
std::string checksum_text(std::uint64_t checksum);

// Checksums of a file in blocks of one size, the last one shorter. A reader of a part of a file
// reads whole blocks and can name a block that has changed. Blocks grow with the file, so that a
// manifest stays small.
class BlockChecksums {
 public:
  BlockChecksums() = default;
  BlockChecksums(Bytes block, std::vector<std::uint64_t> sums)
      : block_(block), sums_(std::move(sums)) {}

  // The block for a file of `file_bytes`: 1 MiB, doubled until the file has at most 65,536 blocks.
  static Bytes block_for(Bytes file_bytes) {
    Bytes block = 1_MiB;
    while (file_bytes / block >= 65'536) block = block * 2;
    return block;
  }

  Bytes block() const { return block_; }
  const std::vector<std::uint64_t>& sums() const { return sums_; }
  // Whether these are the sums of a file of `file_bytes`.
  bool fits(Bytes file_bytes) const {
    if (block_.value <= 0 || file_bytes.value < 0) return false;
    const std::int64_t blocks = file_bytes / block_ + (file_bytes % block_ > Bytes() ? 1 : 0);
    return static_cast<std::int64_t>(sums_.size()) == blocks;
  }
  // Sets the sums of the blocks that begin at `offset`, a multiple of a block; `bytes` are whole
  // blocks, or reach the end of the file. Blocks may come in any order.
  void set(Bytes offset, std::span<const std::byte> bytes) {
    STRATA_ASSERT(offset.value >= 0 && offset % block_ == Bytes());
    auto number = static_cast<std::size_t>(offset / block_);
    for (; !bytes.empty(); bytes = bytes.subspan(std::min(block_.size(), bytes.size())), ++number) {
      if (number >= sums_.size()) sums_.resize(number + 1);
      sums_[number] = checksum_of(bytes.first(std::min(block_.size(), bytes.size())));
    }
  }

 private:
  Bytes block_ = 1_MiB;
  std::vector<std::uint64_t> sums_;
};

enum class TensorRole : std::uint8_t {
  kParameter,
  kBuffer,      // of the model, as rank 0 has it
  kRankBuffer,  // as another rank has it, called "<rank>:<name>"; for the same number of ranks
  kClient,      // that the script gave
};
std::string_view name_of(TensorRole role);

// A tensor of the model, or of the script: whole, as its user knows it.
struct ManifestTensor {
  std::string name;
  TensorRole role = TensorRole::kParameter;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;  // that the model computes in; what files hold may be wider
  bool trainable = false;
  std::vector<std::string> aliases;  // other names of the same parameter (tied weights)
  // Extents count [N, C, spatial dimensions] with C innermost (plan/param_spec.h).
  bool channels_last = false;
  bool operator==(const ManifestTensor&) const = default;
};

struct ManifestFile {
  std::string name;  // within the checkpoint's folder
  Bytes bytes;
  BlockChecksums checksums;
};

// The kind of an extent that holds the tensor itself. Others are what an optimizer keeps of it,
// element by element: "exp_avg", "exp_avg_sq", or as an optimizer of the user's names them.
inline constexpr std::string_view kValue = "value";

// A kind whose name ends so holds the scales of a state in 8 bits: a number for each 256 elements,
// counted from the tensor's first one. Extents of it count these numbers.
inline constexpr std::string_view kScales = ".scales";
inline constexpr std::int64_t kBlock8 = 256;

// The elements of a tensor for which a kind has one number.
inline std::int64_t elements_each(std::string_view kind) {
  return kind.ends_with(kScales) ? kBlock8 : 1;
}
// The numbers of a kind, for a tensor of `numel` elements.
inline Numel numel_of(std::string_view kind, Numel numel) {
  const std::int64_t each = elements_each(kind);
  return Numel((numel.value + each - 1) / each);
}

// Elements [begin, end) of a tensor, flattened, as `dtype` at `offset` of a file.
struct ManifestRange {
  std::size_t tensor = 0;
  std::size_t kind = 0;  // of Manifest::kinds
  DType dtype = DType::kFloat32;
  std::size_t file = 0;
  Bytes offset;
  Numel begin;
  Numel end;
  bool operator==(const ManifestRange&) const = default;
};

// Where an extent ends in its file.
inline Bytes end_of(const ManifestRange& extent) {
  return extent.offset + bytes_of(extent.end - extent.begin, extent.dtype);
}

struct Manifest {
  static constexpr int kVersion = 1;
  static constexpr int kVersionOfFormats = 2;  // of a manifest with a memory format

  std::string tag;
  int world_size = 1;
  int stage = 0;
  // A JSON object: steps, loss scale, scheduler, param groups, the configuration, versions of
  // libraries, the script's own state. The core keeps it unchanged.
  std::string training = "{}";
  std::vector<std::string> kinds;  // kValue first
  std::vector<ManifestTensor> tensors;
  std::vector<ManifestFile> files;
  std::vector<ManifestRange> extents;  // by file and offset
};

inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr Bytes kManifestBytesMax = 2_GiB;

// JSON with a checksum of its own. UsageError for a `training` that nests deeper than 250 levels.
std::string to_text(const Manifest& manifest);
// Believes nothing: every name, index, range and size is checked, extents of one tensor and kind
// neither overlap nor leave a hole, extents lie within their files. `path` names it in messages.
Manifest parse_manifest(std::string_view text, std::string_view path);
// Reads and parses FOLDER/manifest.json. IoError where there is none, FormatError where that is a
// link out of the folder.
Manifest read_manifest(const std::string& folder);

// The files and extents that one rank wrote, for the rank that makes the manifest of all.
struct RankManifest {
  std::vector<ManifestFile> files;
  std::vector<ManifestRange> extents;  // file: place in `files`
};
std::string to_text(const RankManifest& part);
RankManifest parse_manifest_part(std::string_view text);
void append(Manifest& manifest, RankManifest part);

// The tensors in the bytes [begin, end) of a file: "tensor 'w' (value)". None where these lie
// between tensors, or in the header.
std::vector<std::string> owners_of(const Manifest& manifest, std::size_t file, Bytes begin,
                                   Bytes end);

// Whether it can name a file in a folder and nothing else: no separators, not hidden, not empty, at
// most 200 bytes.
bool is_plain_file_name(std::string_view name);

// Checks that the file at `path`, after all links, lies in `folder` itself: a link out of it may
// lead to a file that another program changes or removes, or that its reader should not see.
// FormatError with both paths. A missing file passes: opening it fails.
void require_inside(const std::string& folder, const std::string& path);

}  // namespace strata::format
