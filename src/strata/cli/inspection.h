// The content of a training checkpoint, as `strata inspect` shows it: where it comes from, what was
// saved of how many tensors, in which files, and what is wrong with them: everything that is wrong
// is found, not only the first. Threads: one, beside those that read. Memory: the manifest, and
// where every byte is read a TransferRing. Errors: of folder.h.
#pragma once

#include <memory>
#include <string>

#include "strata/checkpoint/reader.h"
#include "strata/cli/console.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct InspectRequest {
  std::string path;
  bool verify = false;  // read every byte and compare checksums
};

Report inspect(const InspectRequest& request, const std::shared_ptr<memory::Ledger>& ledger,
               Console& console);

// One line: the file, the range, what is wrong, and the tensors.
std::string text_of(const format::Manifest& manifest, const checkpoint::WrongRange& wrong);

}  // namespace strata::cli
