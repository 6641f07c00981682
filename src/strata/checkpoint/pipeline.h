// A ring of buffers, and the one loop that keeps several of them in flight. A source begins to fill
// a buffer, and when it is full a sink begins to take its bytes; both may go on by themselves (a
// transfer of files, work of a stream, threads).
//
//   source.next() -> fill(buffer) ... full -> source.filled() -> sink.take() ... ring: used again
//
// The use of a buffer ends with a transfer or an event on every path: where fill() or take() throws
// after it has queued work, an event behind that work is recorded, and the ring waits for it.
//
// Threads: one thread. Ownership: a ring owns its buffers, charged to the ledger as staging, and
// the transfers and events of their uses; a pipeline borrows source, sink and ring. Errors:
// OutOfMemoryError; UsageError for options that make no ring; those of source, sink and transfers,
// from the call that waits; what is in flight has ended when they leave a pipeline.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/format/weight_map.h"
#include "strata/io/io_engine.h"
#include "strata/memory/host_buffer.h"

namespace strata::checkpoint {

// By default the rings of all ranks of a host fit the last-level cache of its processors: bytes
// that are read from the page cache into larger rings cross the memory bus three times instead of
// once, and take twice as long. The buffers are large enough for the speed of a link.
struct RingOptions {
  int buffers = 12;
  Bytes buffer_bytes = 4_MiB;
};

// A ring of equal buffers through which bytes travel between files, the host and a device. A buffer
// is neither handed out again nor freed before its last use has ended: a transfer, work queued on a
// stream (an event), or both. Each begins at a block of direct transfers (io::File::kDirectBlock),
// unless it is smaller than one.
class TransferRing {
 public:
  // The memory that a ring with these options takes.
  static Bytes room(const RingOptions& options);
  // Announces such a ring to a device, which then makes its memory beside the caller.
  static void expect(const RingOptions& options, device::Device& device) {
    device.expect_host(room(options), memory::Kind::kStaging);
  }

  // Pinned host memory of a device.
  TransferRing(const RingOptions& options, device::Device& device);
  // Pageable host memory. `ledger`: null charges nothing.
  TransferRing(const RingOptions& options, const std::shared_ptr<memory::Ledger>& ledger);
  // Memory of the caller's, which outlives the ring: its pieces of `buffer_bytes`, the last one
  // smaller. It begins at a block.
  TransferRing(std::span<std::byte> memory, Bytes buffer_bytes);
  // Waits for all uses and drops their errors.
  ~TransferRing();

  std::size_t size() const { return uses_.size(); }
  Bytes buffer_bytes() const { return buffer_bytes_; }

  // Takes the next turn (0, 1, 2, ...), and waits until the earlier use of its buffer has ended.
  std::size_t next();
  // The buffer of a turn; turns go round.
  std::span<std::byte> buffer(std::size_t turn);
  // The transfer that uses the buffer from now on.
  void started(std::size_t turn, std::unique_ptr<io::Transfer> transfer);
  // Work that was queued on a stream uses the buffer until `event`.
  void used_until(std::size_t turn, std::unique_ptr<device::Event> event);
  // Runs `work`, which queues uses of the buffer on a stream, and records the event behind them,
  // also where it throws. `stream`: null records none.
  void queue(std::size_t turn, device::Stream* stream, const std::function<void()>& work);
  // Waits for the use of a buffer, or of all.
  void wait(std::size_t turn);
  void drain();
  // As drain(), and drops errors.
  void abandon() noexcept;

 private:
  struct Use {
    std::unique_ptr<io::Transfer> transfer;  // null: none
    std::unique_ptr<device::Event> event;    // null: nothing queued uses the buffer
  };
  Use& use(std::size_t turn) { return uses_[turn % uses_.size()]; }

  Bytes buffer_bytes_;
  Bytes stride_;
  std::unique_ptr<device::HostMemory> pinned_;
  memory::HostBuffer pageable_;
  std::span<std::byte> memory_;  // of one of the two, or the caller's
  std::vector<Use> uses_;
  std::size_t turns_ = 0;
};

// The bytes that one buffer carries.
struct Piece {
  std::size_t index = 0;  // how many pieces the source gave before
  std::size_t file = 0;   // where it comes from or goes to, as the source counts
  Bytes offset;
  Bytes bytes;                   // at most a buffer
  std::span<std::byte> content;  // in the buffer, from fill() on

  format::FileOffset place() const { return {file, offset}; }
};

class Source : public Interface {
 public:
  // Sets `file`, `offset` and `bytes` of the next piece. False: there is none (yet).
  virtual bool next(Piece& piece) = 0;
  // Begins to fill `content`, which begins where the buffer does unless fill() sets it. Returns the
  // transfer that ends the filling; null: work on stream() does, or it has ended.
  virtual std::unique_ptr<io::Transfer> fill(Piece& piece, std::span<std::byte> buffer) = 0;
  // The stream on which fill() queues work; null: it queues none.
  virtual device::Stream* stream() { return nullptr; }
  // Called when the piece is full, before the sink takes it. Throws for bytes that are wrong.
  virtual void filled(const Piece& /*piece*/) {}
  // Called from the handler of an error of filling. Where it returns, the piece is left out.
  virtual void failed(const Piece& /*piece*/) { throw; }
};

class Sink : public Interface {
 public:
  // Begins to take a piece's content. Returns as Source::fill().
  virtual std::unique_ptr<io::Transfer> take(const Piece& piece) = 0;
  virtual device::Stream* stream() { return nullptr; }
  // Queues what is left to do of the pieces taken so far: at sync points and at the end.
  virtual void settle() {}
};

// A sink that is one function.
class Taker final : public Sink {
 public:
  using Take = std::function<std::unique_ptr<io::Transfer>(const Piece& piece)>;
  explicit Taker(Take take) : take_(std::move(take)) {}
  std::unique_ptr<io::Transfer> take(const Piece& piece) override { return take_(piece); }

 private:
  Take take_;
};

// Offsets of the source, ascending, at which ranks meet: reached(i) is called when the sink has
// begun to take all pieces before places[i]. Filling goes on meanwhile.
struct SyncPoints {
  std::vector<format::FileOffset> places;
  std::function<void(std::size_t)> reached;
  // Called once, before any place is reached, and not before the sink has begun to take the first
  // piece, if there is one. May be empty.
  std::function<void()> begun = nullptr;
};

struct CopyOptions {
  // Buffers, less than the ring's, that are left to what the sink has begun while others are
  // filled.
  std::size_t taking = 0;
  const SyncPoints* sync_points = nullptr;  // null: none
};

class Pipeline : NonCopyable {
 public:
  Pipeline(Source& source, Sink& sink, TransferRing& ring, const CopyOptions& options = {});
  // Waits for what is in flight, unless take_all() or drain() has returned.
  ~Pipeline();

  // Begins to fill all pieces that the source has, and takes as many as that needs.
  void pump();
  // Takes the pieces that are left. The sink's transfers and queued work may go on.
  void take_all();
  // The same, and waits for it.
  void drain();

 private:
  struct Filling {
    Piece piece;
    std::size_t turn = 0;
  };
  void begin(Piece piece);
  void take_one();
  void reach(const format::FileOffset* next);  // null: the end
  void tell_begun();
  void use(std::size_t turn, device::Stream* stream,
           const std::function<std::unique_ptr<io::Transfer>()>& begin);

  Source& source_;
  Sink& sink_;
  TransferRing& ring_;
  CopyOptions options_;
  std::deque<Filling> filling_;  // in order
  std::size_t begun_ = 0;
  std::size_t reached_ = 0;  // sync points
  bool told_begun_ = false;
  bool idle_ = true;  // nothing was left in flight by an error
};

// Copies all pieces of the source; what the sink begins has ended when it returns.
void copy(Source& source, Sink& sink, TransferRing& ring, const CopyOptions& options = {});

}  // namespace strata::checkpoint
