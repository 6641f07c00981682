#include "strata/comm/host/rank_process.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cerrno>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>

#include "strata/base/errno_text.h"
#include "strata/base/error.h"

namespace strata::comm {
namespace {

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

FileDescriptor open_process(int rank, pid_t pid) {
  FileDescriptor process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process.valid()) {
    throw CommError(fmt::format(
        "cannot watch the process of rank {}: it has ended, or it is in another PID namespace "
        "(process {}; pidfd_open: {})",
        rank, pid, errno_text(errno)));
  }
  return process;
}

FileDescriptor open_segment(int rank, const SegmentAddress& address) {
  const std::string path = fmt::format("/proc/{}/fd/{}", address.pid, address.fd);
  FileDescriptor segment(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!segment.valid()) {
    throw CommError(fmt::format(
        "cannot open the shared memory of rank {}: run all ranks of this host as one user in one "
        "container, or use the gloo backend ({}: {})",
        rank, path, errno_text(errno)));
  }
  struct stat status {};
  if (::fstat(segment.get(), &status) != 0 ||
      status.st_size < static_cast<off_t>(sizeof(SegmentHeader))) {
    throw CommError(fmt::format(
        "what rank {} announced is not its shared memory: the ranks are probably in different PID "
        "namespaces; run them in one container, or use the gloo backend ({})",
        rank, path));
  }
  return segment;
}

}  // namespace

SegmentAddress SegmentAddress::of(const SharedSegment& segment) {
  return {boot_id(), ::getpid(), segment.fd(), segment.header().key};
}

std::string SegmentAddress::to_text() const {
  return nlohmann::json({{"host", host}, {"pid", pid}, {"fd", fd}, {"key", key}}).dump();
}

SegmentAddress SegmentAddress::from_text(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const bool whole = json.is_object() && json.contains("host") && json.contains("pid") &&
                     json.contains("fd") && json.contains("key");
  if (!whole) {
    throw CommError(
        fmt::format("every rank must build the same kind of collectives: this is not an address of "
                    "shared memory "
                    "('{}')",
                    text));
  }
  return {json["host"].get<std::string>(), json["pid"].get<pid_t>(), json["fd"].get<int>(),
          json["key"].get<std::uint64_t>()};
}

RankProcess::RankProcess(int rank, const SegmentAddress& address) : rank_(rank), pid_(address.pid) {
  if (address.host != boot_id()) {
    throw CommError(
        fmt::format("shared memory serves ranks of one host, but rank {} is on another one: use "
                    "the gloo backend",
                    rank));
  }
  process_ = open_process(rank, pid_);
  segment_ = open_segment(rank, address);
  header_memory_ = memory::MappedMemory::of_file(
      segment_.get(), Bytes(0), Bytes(sizeof(SegmentHeader)),
      memory::MappedMemory::Access::kReadWrite, "a peer's control block");
  header_ = std::launder(reinterpret_cast<SegmentHeader*>(header_memory_.bytes().data()));
  if (header_->key != address.key) {
    throw CommError(fmt::format(
        "what rank {} announced is not its shared memory: the ranks are probably in different PID "
        "namespaces; run them in one container, or use the gloo backend (process {}, descriptor "
        "{})",
        rank, pid_, address.fd));
  }
}

std::optional<BufferView> RankProcess::find(std::uint64_t id) {
  const std::uint64_t changes = header_->directory.changes();
  if (changes != seen_changes_) drop_stale_mappings();
  seen_changes_ = changes;
  auto known = mappings_.find(id);
  if (known == mappings_.end()) {
    const auto place = header_->directory.find(id);
    if (!place) return std::nullopt;
    auto memory = std::make_shared<const memory::MappedMemory>(memory::MappedMemory::of_file(
        segment_.get(), Bytes(place->offset), Bytes(place->bytes),
        memory::MappedMemory::Access::kRead, fmt::format("a buffer of rank {}", rank_)));
    known = mappings_.emplace(id, Mapping{*place, std::move(memory)}).first;
  }
  return BufferView{known->second.memory, known->second.memory->bytes()};
}

void RankProcess::drop_stale_mappings() {
  std::erase_if(mappings_, [&](const auto& item) {
    return header_->directory.find(item.first) != item.second.place;
  });
}

std::string RankProcess::why_gone() const {
  pollfd request{process_.get(), POLLIN, 0};
  const bool ended = ::poll(&request, 1, 0) == 1;
  return ended ? fmt::format("process {} has ended", pid_) : std::string();
}

}  // namespace strata::comm
