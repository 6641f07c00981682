// Turns a training checkpoint into a Hugging Face folder: the values of parameters and of
// persistent buffers, each once, in files that transformers loads. Reads the checkpoint's files
// from front to back, checks every block on the way, casts, and writes each piece to where its
// tensor lies. The former content of OUT stays until all of it is written and was what its
// checksums say.
//
// Threads: one, beside those of the IoEngine. Memory: two rings, whatever the model's size; and the
// manifest. Errors: FormatError of a checkpoint that is damaged (names file, bytes and tensor);
// UsageError for an OUT that is a training checkpoint itself; IoError.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "strata/checkpoint/pipeline.h"
#include "strata/cli/console.h"
#include "strata/format/manifest.h"
#include "strata/format/sharded_writer.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

struct ConsolidationOptions {
  std::optional<DType> dtype;  // of all floating tensors; absent: in which the model computes
  Bytes shard_max = 5'000'000'000_B;
  bool verify = true;
  checkpoint::RingOptions ring = {8, 4_MiB};  // of each of the two
};

struct Consolidated {
  std::string out;
  std::size_t tensors = 0;
  Numel elements;
  Bytes bytes;                                               // of tensors
  std::vector<std::string> files;                            // of weights
  std::vector<std::string> copied;                           // of the model: config.json, ...
  std::vector<std::pair<std::string, std::string>> aliases;  // left out, and whose values they have
  bool without_frozen = false;  // the checkpoint was saved without them
  Bytes staging;                // the most that was held of rings
};

// `path`: as choose_checkpoint() takes it.
Consolidated consolidate(const std::string& path, const std::string& out,
                         const ConsolidationOptions& options, io::IoEngine& io,
                         const std::shared_ptr<memory::Ledger>& ledger, Console& console);

std::string text_of(const Consolidated& result);
nlohmann::json json_of(const Consolidated& result);

}  // namespace strata::cli
