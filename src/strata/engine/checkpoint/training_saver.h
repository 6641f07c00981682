// Saves checkpoints that training goes on from, on all ranks at once: each writes its own shards,
// and rank 0 publishes them under one manifest (checkpoint/folder.h) when all are on disk. An
// AsyncSaver copies this rank's shards to the host, and a thread writes them while the next steps
// run; save_training() writes on the engine's thread, through a ring. Ranks notify rank 0 by small
// files in the checkpoint's own folder, since collectives belong to training.
//
// Threads: the calls belong to the engine's thread; AsyncSaver's writer is a thread of its own.
// Memory: one TransferRing, or the copy. Errors, on every rank alike: UsageError for a tag that is
// no name, or something else's, after an update that failed, and where ranks name different tags;
// IoError, before the first byte where the disk has not room for all files. The folder
// stays as it was then. AsyncSaver throws errors of the copy from start(), and those of the writer
// from the next start() or wait().
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "strata/checkpoint/folder.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/checkpoint/saved_shards.h"
#include "strata/engine/engine.h"
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
  checkpoint::NewCheckpointOptions publish;
};

// Collective.
void save_training(Engine& engine, const SaveRequest& request, io::IoEngine& io,
                   io::FolderCalls& calls, const checkpoint::RingOptions& staging = {});

// The bytes that an AsyncSaver copies to the host when the optimizer has its states, with some
// room: this rank's files and `more` bytes, of buffers and the script's tensors.
Bytes copied_bytes(Engine& engine, Bytes more = {});

class AsyncSaver {
 public:
  // Borrows the engine, whose device outlives it. `io` and `calls` are used by the writer. Owns the
  // copy, pinned host memory of the size of this rank's files, which stays for the next save.
  // `staging`: start() makes no copy, and writes the files itself through such a ring.
  AsyncSaver(Engine& engine, std::shared_ptr<io::IoEngine> io,
             std::shared_ptr<io::FolderCalls> calls,
             std::optional<checkpoint::RingOptions> staging = std::nullopt);
  // Waits for this rank's files, and on rank 0 for the others' as long as they still come: up to a
  // minute, so a caller that holds a lock of its program (Python's) gives it up meanwhile.
  ~AsyncSaver();

  // Begins to make the memory of the copy beside the caller, so that the first save need not wait
  // for it; when the optimizer has its states. `more`: as of copied_bytes(). A save of more bytes
  // than that replaces the memory. Not collective.
  void expect(Bytes more = {});
  // Collective. Waits for the save before, copies the shards, and returns.
  void start(const SaveRequest& request);
  // Collective: the last save that was started stands, or has failed.
  void wait();
  // Whether one was started that no wait() has ended. The same on every rank.
  bool pending() const { return pending_; }

 private:
  struct Job;
  void copy_shards(Job& job, ShardStates& states);
  void write_files(Job& job, ShardStates* states);
  void publish(Job& job);

  Engine& engine_;
  std::shared_ptr<io::IoEngine> io_;
  std::shared_ptr<io::FolderCalls> calls_;
  std::optional<checkpoint::RingOptions> staging_;  // nullopt: a copy is made, and written later
  Bytes expected_;                                  // of the copy
  std::unique_ptr<device::HostMemory> copy_;
  bool pending_ = false;
  std::unique_ptr<Job> job_;
  std::thread writer_;
};

}  // namespace strata::engine
