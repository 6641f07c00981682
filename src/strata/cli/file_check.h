// Whether a training checkpoint is what was written: every file there, inside the folder and as
// long as it was, and, where that is asked for, every block by its checksum. Everything that is
// wrong is found, not only the first. Threads: one. Memory: a BufferRing. Errors: those of opening
// and reading are findings, too.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "strata/cli/progress.h"
#include "strata/format/manifest.h"
#include "strata/io/io_engine.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct ByteRange {
  Bytes begin;
  Bytes end;
  bool operator==(const ByteRange&) const = default;
};

struct Finding {
  std::string file;
  std::optional<ByteRange> range;    // absent: the file as a whole
  std::vector<std::string> tensors;  // that the range touches, as format::owner_of_byte() says it
  std::string problem;
};

// One line: the file, the range, what is wrong, and the tensors.
std::string text_of(const Finding& finding);

// Of the bytes [begin, end) of a file: "tensor 'w' (value)". None where it is between tensors.
std::vector<std::string> owners_of(const format::Manifest& manifest, std::size_t file,
                                   ByteRange range);

// Looks at names and sizes.
std::vector<Finding> check_files(const std::string& folder, const format::Manifest& manifest);

// The same, and reads everything. Wrong blocks beside each other are one finding.
std::vector<Finding> verify_files(const std::string& folder, const format::Manifest& manifest,
                                  io::IoEngine& io, const std::shared_ptr<memory::Ledger>& ledger,
                                  Console& console);

}  // namespace strata::cli
