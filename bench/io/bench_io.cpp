// How fast a file is read as loading reads: through a ring of eight buffers of 4 MiB, by threads.
//   strata_bench_io [--folder .] [--mib 2048] [--threads 4] [--repetitions 3]
// Makes a file in the folder, and removes it. Rows: the file outside of the page cache (written
// back, then dropped) and inside; columns: buffered and direct reads in turns, GB/s, median; and
// what `auto` would take, from its own look and probe. Virtual machines and drives have caches of
// their own, so that "cold" is only as cold as this system can make it.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/io/pending_range.h"
#include "strata/io/read_probe.h"
#include "strata/io/thread_engine.h"
#include "strata/memory/host_buffer.h"

namespace strata::io {
namespace {

constexpr Bytes kBuffer = 4_MiB;
constexpr std::size_t kBuffers = 8;

struct Request {
  std::string folder = ".";
  Bytes bytes = 2048_MiB;
  int threads = 4;
  int repetitions = 3;
};

Request parse(const std::vector<std::string>& arguments) {
  Request request;
  if (arguments.size() % 2 != 0) throw UsageError("every option takes a value");
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& value = arguments[i + 1];
    if (arguments[i] == "--folder") {
      request.folder = value;
    } else if (arguments[i] == "--mib") {
      request.bytes = 1_MiB * std::stol(value);
    } else if (arguments[i] == "--threads") {
      request.threads = std::stoi(value);
    } else if (arguments[i] == "--repetitions") {
      request.repetitions = std::stoi(value);
    } else {
      throw UsageError(fmt::format("unknown option ({})", arguments[i]));
    }
  }
  return request;
}

// A file of bytes that no drive compresses well, gone when this is.
class Sample {
 public:
  Sample(const Request& request, std::span<std::byte> scratch)
      : path_(fmt::format("{}/strata_bench_io.{}", request.folder, ::getpid())) {
    File file(path_, File::Mode::kCreate);
    std::uint64_t state = 88172645463325252U;
    for (Bytes at; at < request.bytes;) {
      for (std::byte& byte : scratch) {
        state ^= state << 13U;
        state ^= state >> 7U;
        state ^= state << 17U;
        byte = static_cast<std::byte>(state >> 32U);
      }
      const Bytes part = std::min(request.bytes - at, Bytes(scratch.size()));
      write_fully(file, at, scratch.first(part.size()));
      at += part;
    }
    file.sync();
  }
  ~Sample() { ::unlink(path_.c_str()); }
  Sample(const Sample&) = delete;
  Sample& operator=(const Sample&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Bench {
 public:
  explicit Bench(const Request& request)
      : request_(request),
        memory_(kBuffer * std::int64_t{kBuffers}),
        sample_(request, memory_.bytes()),
        file_(sample_.path(), File::Mode::kRead),
        direct_(file_.direct()),
        io_({.threads = request.threads, .piece = 1_MiB}) {
    for (std::size_t i = 0; i < kBuffers; ++i) {
      buffers_.push_back(memory_.bytes().subspan(i * kBuffer.size(), kBuffer.size()));
    }
  }

  void run() {
    fmt::print("{} in {}, {} threads, direct reads {}\n", to_string(request_.bytes),
               request_.folder, request_.threads,
               direct_.direct_fd() >= 0 ? "offered" : "not offered");
    fmt::print("{:5} {:>14} {:>12}  auto\n", "", "buffered GB/s", "direct GB/s");
    for (const bool warm : {false, true}) print_row(warm);
  }

 private:
  void print_row(bool warm) {
    std::vector<double> buffered;
    std::vector<double> direct;
    for (int i = 0; i < request_.repetitions; ++i) {
      prepare(warm);
      buffered.push_back(speed(file_));
      prepare(warm);
      direct.push_back(speed(direct_));
    }
    prepare(warm);
    const ReadableFile ways{&file_, &direct_};
    const FileRange all{0, Bytes(), request_.bytes};
    const ReadChoice choice =
        ReadProbe({&ways, 1}, {&all, 1}).choose(ReadWay::kAuto, io_, buffers_);
    fmt::print("{:5} {:14.2f} {:12.2f}  {} ({})\n", warm ? "warm" : "cold", median(buffered),
               median(direct), choice.direct ? "direct" : "buffered", choice.reason);
  }

  void prepare(bool warm) {
    if (warm) {
      speed(file_);
    } else if (::posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_DONTNEED) != 0) {
      throw IoError("the file cannot be dropped from the page cache: path=" + file_.path());
    }
  }

  double speed(const File& file) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::unique_ptr<Transfer>> transfers(kBuffers);
    std::size_t turn = 0;
    for (Bytes at; at < request_.bytes; turn = (turn + 1) % kBuffers) {
      if (transfers[turn]) transfers[turn]->wait();
      const Bytes part = std::min(request_.bytes - at, kBuffer);
      transfers[turn] = io_.read(file, at, buffers_[turn].first(part.size()));
      at += part;
    }
    for (const auto& transfer : transfers) {
      if (transfer) transfer->wait();
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    return static_cast<double>(request_.bytes.value) * 1e-9 / seconds.count();
  }

  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  const Request request_;
  memory::HostBuffer memory_;
  Sample sample_;
  File file_;
  File direct_;
  std::vector<std::span<std::byte>> buffers_;
  ThreadEngine io_;
};

}  // namespace
}  // namespace strata::io

int main(int argc, char** argv) {
  try {
    strata::io::Bench(strata::io::parse({argv + 1, argv + argc})).run();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "strata_bench_io: {}\n", error.what());
    return 1;
  }
}
