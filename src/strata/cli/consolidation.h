// Turns a training checkpoint into a Hugging Face folder: the values of parameters and of
// persistent buffers, each once, in files that transformers loads. Reads the checkpoint's files
// from front to back, checks every block on the way, casts, and writes each piece to where its
// tensor lies. The former content of OUT stays until all of it is written and was what its
// checksums say.
//
// Threads: one, beside those that read and write. Memory: two rings, whatever the model's size; and
// the manifest. Errors: FormatError of a checkpoint that is damaged (names file, bytes and tensor);
// UsageError for an OUT that is a training checkpoint itself; IoError.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "strata/base/dtype.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/cli/console.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct ConsolidationRequest {
  std::string path;  // as choose_checkpoint() takes it
  std::string out;
  std::optional<DType> dtype = {};  // of floating tensors; absent: in which the model computes
  Bytes shard_max = 5'000'000'000_B;
  bool verify = true;
  checkpoint::RingOptions ring = {8, 4_MiB};  // of each of the two
};

Report consolidate(const ConsolidationRequest& request,
                   const std::shared_ptr<memory::Ledger>& ledger, Console& console);

}  // namespace strata::cli
