// The loop that limit.py times: a rank's part of some files through a ring of pinned memory onto
// its GPU, in threads, each with pieces and a stream of its own. It has no Python, whose lock takes
// more time per piece of two MiB than reading and copying it. It uses nothing of the engine except
// the calls of its CUDA device. C calls, for ctypes: an error is a text, null if there was none.
// Threads: one caller. Ownership: the caller closes its LoadLoop, which borrows the target.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "strata/base/error.h"
#include "strata/device/cuda_device.h"

namespace {

using strata::Bytes;
namespace device = strata::device;

struct SourceFile {
  int fd;
  std::int64_t begin;  // among all files, one behind the other
  std::int64_t end;
};

// A thread's pieces, used in turns, and the stream that empties them.
struct Lane {
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<device::Event> copied[2];
};

}  // namespace

struct LoadLoop {
  std::vector<SourceFile> files;
  std::unique_ptr<device::Device> gpu;  // null: everything is on the host
  std::unique_ptr<device::HostMemory> ring;
  std::vector<Lane> lanes;
  std::int64_t piece = 0;
  std::string error;

  ~LoadLoop() {
    for (const SourceFile& file : files) ::close(file.fd);
  }

  void open_files(const char* const* paths, int count) {
    std::int64_t at = 0;
    for (int i = 0; i < count; ++i) {
      const int fd = ::open(paths[i], O_RDONLY | O_CLOEXEC);
      if (fd < 0)
        throw std::runtime_error(std::string(paths[i]) + ": " + strata::errno_text(errno));
      const std::int64_t size = ::lseek(fd, 0, SEEK_END);
      files.push_back({fd, at, at + size});
      at += size;
    }
  }

  void make_lanes(int index, int threads) {
    lanes.resize(static_cast<std::size_t>(threads));
    if (index < 0) return;
    gpu = device::make_cuda_device({.index = index});
    ring = gpu->allocate_host(Bytes(piece * 2 * threads), strata::memory::Kind::kStaging);
    for (Lane& lane : lanes) lane.stream = gpu->create_stream();
  }

  void read(std::int64_t at, std::byte* into, std::int64_t bytes) const {
    for (const SourceFile& file : files) {
      while (bytes > 0 && file.begin <= at && at < file.end) {
        const std::int64_t most = std::min(bytes, file.end - at);
        const ssize_t got = ::pread(file.fd, into, static_cast<std::size_t>(most), at - file.begin);
        if (got <= 0) throw std::runtime_error(std::string("pread: ") + strata::errno_text(errno));
        at += got;
        into += got;
        bytes -= got;
      }
    }
  }

  void move(std::size_t lane, int turn, std::int64_t at, std::int64_t bytes, std::byte* target,
            bool reads, bool copies) {
    if (gpu == nullptr) return read(at, target, bytes);
    Lane& own = lanes[lane];
    const auto first =
        (lane * 2 + static_cast<std::size_t>(turn)) * static_cast<std::size_t>(piece);
    const auto buffer = ring->bytes().subspan(first, static_cast<std::size_t>(bytes));
    if (own.copied[turn]) own.copied[turn]->wait();
    if (reads) read(at, buffer.data(), bytes);
    if (!copies) return;
    gpu->copy({target, buffer.size()}, buffer, *own.stream);
    own.copied[turn] = own.stream->record();
  }

  // Moves the bytes [first, end) of the files to `target`.
  void pass(std::int64_t first, std::int64_t end, std::byte* target, bool reads, bool copies) {
    std::atomic<std::int64_t> next = first;
    std::vector<std::exception_ptr> failures(lanes.size());
    std::vector<std::thread> threads;
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
      threads.emplace_back([&, lane] {
        try {
          for (int turn = 0;; turn = 1 - turn) {
            const std::int64_t at = next.fetch_add(piece);
            if (at >= end) break;
            move(lane, turn, at, std::min(piece, end - at), target + (at - first), reads, copies);
          }
          if (lanes[lane].stream) lanes[lane].stream->synchronize();
        } catch (...) {
          failures[lane] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures)
      if (failure) std::rethrow_exception(failure);
  }
};

extern "C" {

// Never null; check its error. `gpu`: an index among those that the process sees; below 0: none.
LoadLoop* strata_load_loop_open(const char* const* paths, int files, int gpu, int threads,
                                std::int64_t piece) {
  auto loop = std::make_unique<LoadLoop>();
  try {
    loop->piece = piece;
    loop->open_files(paths, files);
    loop->make_lanes(gpu, threads);
  } catch (const std::exception& error) {
    loop->error = error.what();
  }
  return loop.release();
}

const char* strata_load_loop_error(const LoadLoop* loop) {
  return loop->error.empty() ? nullptr : loop->error.c_str();
}

// Returns seconds. `target`: the place of byte `first`, on the GPU if there is one. Without a GPU,
// all bytes are read.
double strata_load_loop_pass(LoadLoop* loop, std::int64_t first, std::int64_t end, void* target,
                             int reads, int copies) {
  const auto began = std::chrono::steady_clock::now();
  try {
    loop->pass(first, end, static_cast<std::byte*>(target), reads != 0, copies != 0);
  } catch (const std::exception& error) {
    loop->error = error.what();
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void strata_load_loop_close(LoadLoop* loop) {
  delete loop;
}

}  // extern "C"
