// Saves a checkpoint that training goes on from, on all ranks at once: each writes its own shards,
// and rank 0 publishes them under one manifest (format/checkpoint_folder.h) when all are on disk.
//
// Threads: the engine's. Memory: one TransferRing. Errors, on every rank alike: UsageError for a
// tag that is no name, or something else's, after an update that failed, and where ranks name
// different tags; IoError, before the first byte where the disk has not room for all files. What
// was in the folder stays as it was then.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/checkpoint/ring.h"
#include "strata/engine/checkpoint/saved_shards.h"
#include "strata/engine/engine.h"
#include "strata/format/block_writer.h"
#include "strata/format/checkpoint_folder.h"
#include "strata/io/folder_calls.h"
#include "strata/io/io_engine.h"

namespace strata::engine {

struct SaveRequest {
  std::string folder;
  std::string tag;  // the same on all ranks
  // JSON object: what the engine's owner wants to have back; of rank 0.
  std::string training = "{}";
  SavedContent content;
  std::vector<std::pair<std::string, std::string>> texts;  // small files beside it: name, content
  format::NewCheckpointOptions publish;
};

// Collective.
void save_training(Engine& engine, const SaveRequest& request, io::IoEngine& io,
                   io::FolderCalls& calls, const checkpoint::RingOptions& staging = {});

// Steps of that, for those who save beside training.
//
// Collective: what must hold before anything is written; on rank 0 the checkpoint to be.
void begin_save(Engine& engine, const SaveRequest& request, io::FolderCalls& calls,
                std::optional<format::NewCheckpoint>& checkpoint);
// Collective: every rank has the same kinds, in one order.
SavedShards plan_together(Engine& engine, const ShardStates& states, const SavedContent& content);
// Collective: IoError on every rank where the files of all are more than the folder's disk has
// free.
void require_room(comm::Collectives& collectives, const SavedShards& saved,
                  const std::string& folder, io::FolderCalls& calls);
// This rank's files, empty, with their space taken: all of them before the first byte of any.
std::deque<format::BlockWriter> make_files(const SavedShards& saved, const std::string& folder,
                                           io::IoEngine& io, io::FolderCalls& calls);
// `parts`: format::to_text() of what every rank wrote, by rank; empty where it wrote nothing.
format::Manifest manifest_of(const SaveRequest& request, SavedShards saved, int stage,
                             std::span<const std::string> parts);

}  // namespace strata::engine
