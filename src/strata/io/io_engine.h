// Seam: positional reads and writes. Implementations: uring_engine (io_uring), thread_engine (pread
// and pwrite on a pool); make_io_engine() makes the better one that the system allows.
//
// A transfer is complete or it failed. The engine continues short transfers and retries EINTR;
// wait() throws every other error as IoError (path, offset, wanted, got, errno), as it does for a
// read past the end of the file. After a failure the target's content, or the file's in the range
// of the write, is unspecified.
//
// A File with a descriptor for direct transfers gives the same bytes, and offsets and memory may
// lie anywhere. But only bytes at whole blocks in both file and memory bypass the page cache.
//
// Registered memory, such as a pinned arena, makes each transfer cheaper. While a registration
// lives, its owner neither unmaps the memory nor gives its pages back; it may outlive the engine.
//
// Threads: internally synchronised; one Transfer belongs to one thread at a time. Transfers run in
// no particular order, so wait() must separate two that overlap in file or memory. read() and
// write() may block while the queue is full. Ownership: the File and the memory must outlive the
// Transfer's wait(). ~Transfer waits and drops errors. An engine finishes all its transfers before
// it is destroyed; a Transfer may outlive it. Errors: UsageError at once for a range that no file
// can have.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "strata/base/interface.h"
#include "strata/base/units.h"
#include "strata/io/file.h"

namespace strata::io {

struct TransferTimes {
  std::chrono::steady_clock::time_point begin;  // when the engine began to work on it
  std::chrono::steady_clock::time_point end;
};

class Transfer : public Interface {
 public:
  virtual bool done() = 0;
  // Throws IoError; each later call throws the same error.
  virtual void wait() = 0;
  // The times of a transfer that is done; nullopt: unknown.
  virtual std::optional<TransferTimes> times() const { return std::nullopt; }
};

class MemoryRegistration : public Interface {
 public:
  explicit MemoryRegistration(std::string refused) : refused_(std::move(refused)) {}
  // The reason why the memory is not registered, and used like any other; empty: it is registered.
  const std::string& refused() const { return refused_; }

 private:
  std::string refused_;
};

class IoEngine : public Interface {
 public:
  virtual std::string_view name() const = 0;
  virtual std::unique_ptr<Transfer> read(const File& file, Bytes offset,
                                         std::span<std::byte> target) = 0;
  virtual std::unique_ptr<Transfer> write(const File& file, Bytes offset,
                                          std::span<const std::byte> source) = 0;
  [[nodiscard]] virtual std::unique_ptr<MemoryRegistration> register_memory(
      std::span<std::byte> /*memory*/) {
    return std::make_unique<MemoryRegistration>("this engine has no use for it");
  }
};

// Makes the engine that the system allows: io_uring, or threads where the kernel refuses it, as the
// seccomp profiles of many containers do. UsageError for impossible options; a refusal is no error.
enum class EngineKind { kAuto, kUring, kThreads };

struct EngineOptions {
  EngineKind kind = EngineKind::kAuto;  // for make_io_engine()
  Bytes piece = 1_MiB;                  // of one request
  int depth = 32;                       // requests under way, of io_uring
  int threads = 4;                      // requests under way, of threads
  int queue_max = 64;                   // transfers that wait to be begun
};

struct ChosenEngine {
  std::unique_ptr<IoEngine> engine;
  // The reason for an engine without io_uring, to be logged once; empty: it has io_uring, or
  // threads were asked for.
  std::string refused;
};

// IoError if io_uring was asked for by name and the system refuses it. `make_ring`: tests replace
// the kernel's ring.
class RequestRing;
ChosenEngine make_io_engine(
    const EngineOptions& options = {},
    const std::function<std::unique_ptr<RequestRing>(int depth)>& make_ring = {});

}  // namespace strata::io
