// One transfer of an engine, cut into pieces that are served in any order. It knows which pieces
// were handed out, which have ended, and the first failure. When several pieces fail, the failure
// at the lowest offset counts; after a failure no more pieces are handed out. Pieces of a file with
// a descriptor for direct transfers end at blocks of the file, so that only the two ends of the
// transfer can lie across one. Threads: internally synchronised. Ownership: shared by the Transfer,
// the engine's queue and the threads that serve a piece; borrows the File and the memory.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "strata/io/io_engine.h"
#include "strata/io/pending_range.h"

namespace strata::io {

class TransferJob {
 public:
  struct Piece {
    std::int64_t index;
    PendingRange range;
    bool is_last;  // no other is handed out after it
  };

  // `piece`: bytes of a piece; the first one may have a block more.
  TransferJob(const PendingRange& range, Bytes piece);

  // The next piece to serve; nullopt when all are handed out, or when one has failed.
  std::optional<Piece> claim();
  // Ends a claimed piece; `error` is null if it is complete.
  void settle(std::int64_t index, std::exception_ptr error);

  bool done();
  // Blocks until no thread serves a piece. Throws the failure.
  void wait();
  void wait_quietly();
  // The times of the first claim and of the last piece's end; nullopt if it is not done, or had no
  // bytes.
  std::optional<TransferTimes> times() const;

 private:
  bool finished() const;

  const PendingRange range_;
  const Bytes piece_;
  const Bytes first_extra_;  // what the first piece has beyond piece_
  const std::int64_t pieces_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::int64_t claimed_ = 0;
  std::int64_t settled_ = 0;
  std::int64_t error_index_ = 0;
  std::exception_ptr error_;
  TransferTimes times_;
};

// The Transfer of a job.
std::unique_ptr<Transfer> transfer_of(std::shared_ptr<TransferJob> job);

}  // namespace strata::io
