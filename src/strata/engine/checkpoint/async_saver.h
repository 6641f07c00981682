// Saves checkpoints beside training: copies this rank's shards to the host, and lets a thread write
// them while the next steps run. When every rank's files are on disk, rank 0's thread publishes the
// checkpoint; ranks tell each other so by small files in the checkpoint's own folder, since their
// collectives belong to training.
//
// Threads: the calls belong to the engine's thread; the writer is a thread of this object's.
// Ownership: borrows the engine, whose device outlives it; owns the copy, pinned host memory of the
// size of this rank's files, which stays for the next save. Errors: those of save_training(), on
// every rank: of what start() itself does at once, of the writer from the next start() or wait().
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "strata/engine/checkpoint/training_saver.h"
#include "strata/engine/engine.h"

namespace strata::engine {

// The bytes that a save of this rank copies to the host when the optimizer has its states: its
// files without buffers and the script's tensors, of which there are `more`; with some room.
Bytes copied_bytes(Engine& engine, Bytes more = {});

class AsyncSaver {
 public:
  // `io` and `calls` are used by the writer.
  AsyncSaver(Engine& engine, std::shared_ptr<io::IoEngine> io,
             std::shared_ptr<io::FolderCalls> calls);
  // Waits for this rank's files, and on rank 0 for the others' as long as they still come: up to a
  // minute, so a caller that holds a lock of its program (Python's) gives it up meanwhile.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  // Begins to make the memory of the copy, beside the caller, so that the first save need not wait
  // for it; when the optimizer has its states. `more`: of buffers and tensors that this rank will
  // save beside its shards. A save of more bytes than that replaces the memory. Not a collective.
  void expect(Bytes more = {});
  // Collective. Waits for the save before, copies the shards, and returns.
  void start(const SaveRequest& request);
  // Collective: the last save that was started stands, or has failed.
  void wait();
  // Whether one was started that nobody has waited for. The same on every rank.
  bool pending() const { return pending_; }
  // Whether this rank's files are on disk, or have failed.
  bool files_written() const;

 private:
  struct Job;
  void copy_shards(Job& job, ShardStates& states);
  void write_files(Job& job);
  void write_and_publish(Job& job);
  void publish_when_all_are_there(Job& job);

  Engine& engine_;
  std::shared_ptr<io::IoEngine> io_;
  std::shared_ptr<io::FolderCalls> calls_;
  Bytes expected_;  // of the copy
  std::unique_ptr<device::HostMemory> copy_;
  bool pending_ = false;
  std::unique_ptr<Job> job_;
  std::thread writer_;
};

}  // namespace strata::engine
