// The speed of reading a file in the way that loading reads: through a ring of eight buffers of 4
// MiB, by threads.
//   strata_bench_io [--folder .] [--mib 2048] [--threads 4] [--repetitions 3]
// Makes a file in the folder, and removes it. Rows: the file outside of the page cache (written
// back, then dropped) and inside. Columns: buffered and direct reads in turns, GB/s, median; and
// the choice of `auto` after its own checks and probe. Virtual machines and drives have caches of
// their own, so "cold" is only as cold as this system can make it.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/checkpoint/reader.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"

namespace strata::io {
namespace {

constexpr checkpoint::RingOptions kRing{8, 4_MiB};

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

// A file of bytes that drives cannot compress well; the destructor removes it.
class Sample {
 public:
  explicit Sample(const Request& request)
      : path_(fmt::format("{}/strata_bench_io.{}", request.folder, ::getpid())) {
    std::vector<std::byte> scratch(kRing.buffer_bytes.size());
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
      write_fully(file, at, std::span(scratch).first(part.size()));
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
        sample_(request),
        file_(sample_.path(), File::Mode::kRead),
        direct_(file_.direct()),
        io_({.piece = 1_MiB, .threads = request.threads}) {}

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
      buffered.push_back(speed(false));
      prepare(warm);
      direct.push_back(speed(true));
    }
    prepare(warm);
    const checkpoint::ReadChoice choice = checkpoint::ReadProbe({&ways_, 1}, {&all_, 1})
                                              .choose(checkpoint::ReadWay::kAuto, io_, ring_);
    fmt::print("{:5} {:14.2f} {:12.2f}  {} ({})\n", warm ? "warm" : "cold", median(buffered),
               median(direct), choice.direct ? "direct" : "buffered", choice.reason);
  }

  void prepare(bool warm) {
    if (warm) {
      speed(false);
    } else if (::posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_DONTNEED) != 0) {
      throw IoError("the file cannot be dropped from the page cache: path=" + file_.path());
    }
  }

  double speed(bool direct) {
    const auto start = std::chrono::steady_clock::now();
    checkpoint::RangeSource source({&ways_, 1}, {&all_, 1}, io_, ring_.buffer_bytes(),
                                   {.direct = direct});
    checkpoint::Taker sink([](const checkpoint::Piece&) { return nullptr; });
    copy(source, sink, ring_);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    return static_cast<double>(request_.bytes.value) * 1e-9 / seconds.count();
  }

  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  const Request request_;
  Sample sample_;
  File file_;
  File direct_;
  checkpoint::ReadableFile ways_{&file_, &direct_};
  checkpoint::FileRange all_{0, Bytes(), request_.bytes};
  checkpoint::TransferRing ring_{kRing, nullptr};
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
