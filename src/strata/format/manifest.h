// The manifest of a training checkpoint: what was saved, in which bytes of which file, and the
// checksum of every block of these. It is the last thing that is written into a checkpoint's
// folder; a folder without one is no checkpoint.
//
//   DIR/latest                                   the tag of the newest checkpoint
//   DIR/TAG/manifest.json                        this
//   DIR/TAG/model-00000-of-00004.safetensors     values: of what is trained the fp32 master
//   weights,
//                                                of the rest what the model holds; buffers
//   DIR/TAG/optimizer-00000-of-00004.safetensors what the optimizer keeps of each value
//
// A rank writes its own shard, so a tensor of the model is the sum of its extents, runs of elements
// in any of the files. Ranks that load read the byte ranges that their own shards need, so that
// neither world size nor stage nor placement of the run that saved matters.
//
// Values; safe everywhere. Errors: FormatError, which names the file and what is wrong in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/format/block_checksums.h"

namespace strata::format {

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
  // Extents count [N, C, spatial dimensions] with C innermost (plan/channel_order.h).
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

// The owner of a file's byte at `offset`, for messages: "tensor 'lm_head.weight' (exp_avg)", or
// "the header".
std::string owner_of_byte(const Manifest& manifest, std::size_t file, Bytes offset);

// Whether it can name a file in a folder and nothing else: no separators, not hidden, not empty, at
// most 200 bytes.
bool is_plain_file_name(std::string_view name);

}  // namespace strata::format
