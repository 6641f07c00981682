// The content of a training checkpoint, as `strata inspect` shows it: where it comes from, what was
// saved of how many tensors, in which files, and what is wrong with them: everything that is wrong
// is found, not only the first. Values; pure but for inspect(), which reads the manifest and, if
// asked to, everything, through a TransferRing. Errors: of folder.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "strata/checkpoint/folder.h"
#include "strata/cli/console.h"
#include "strata/cli/tensor_source.h"
#include "strata/format/manifest.h"
#include "strata/io/io_engine.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct ByteRange {
  Bytes begin;
  Bytes end;
  bool operator==(const ByteRange&) const = default;
};

// A problem of a file.
struct Finding {
  std::string file;
  std::optional<ByteRange> range;    // absent: the file as a whole
  std::vector<std::string> tensors;  // that the range touches, by checkpoint::owners_of()
  std::string problem;
};

// One line: the file, the range, what is wrong, and the tensors.
std::string text_of(const Finding& finding);

// How many tensors of a role there are, and of how many elements.
struct TensorCount {
  std::size_t tensors = 0;
  std::size_t trainable = 0;
  Numel elements;
  std::map<std::string, std::size_t> dtypes;  // that the model computes in: tensors of each
};

// The elements of one kind in the files.
struct KindCount {
  std::string kind;
  std::map<std::string, Numel> stored_as;  // elements by dtype
  Numel elements;
  Bytes bytes;
};

struct Inspection {
  checkpoint::ChosenCheckpoint folder;
  std::string tag;
  int world_size = 1;
  int stage = 0;
  nlohmann::json training;  // an object
  std::map<format::TensorRole, TensorCount> counts;
  std::size_t tied = 0;  // names that belong to a parameter of another name
  std::vector<KindCount> kinds;
  std::vector<std::pair<std::string, Bytes>> files;
  Bytes total;  // of all files
  bool verified = false;
  std::vector<Finding> findings;

  bool whole() const { return findings.empty(); }
  // None where the checkpoint holds nothing of that role.
  TensorCount count(format::TensorRole role) const {
    const auto found = counts.find(role);
    return found == counts.end() ? TensorCount() : found->second;
  }
};

Inspection inspect(const std::string& path, bool every_byte, io::IoEngine& io,
                   const std::shared_ptr<memory::Ledger>& ledger, Console& console);

std::string text_of(const Inspection& inspection);
nlohmann::json json_of(const Inspection& inspection);

}  // namespace strata::cli
