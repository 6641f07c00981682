#include "strata/io/process_memory.h"

#include <fmt/core.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <random>
#include <sstream>

namespace strata::io {
namespace {

constexpr std::size_t kMostParts = 64;  // of one call

using Key = std::array<std::uint64_t, 2>;

// The offer that a process sends to others: numbers in decimal.
struct Offer {
  pid_t pid = 0;
  std::uint64_t key_at = 0;
  Key key{};
  std::uint64_t parts_at = 0;
  std::uint64_t parts = 0;
};

Offer offer_from(const std::string& text) {
  Offer offer;
  std::istringstream stream(text);
  stream >> offer.pid >> offer.key_at >> offer.key[0] >> offer.key[1] >> offer.parts_at >>
      offer.parts;
  if (stream.fail()) throw IoError("this is no offer of memory: '{}'", text);
  return offer;
}

std::uint64_t address_of(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}

iovec range_of(std::uint64_t address, std::size_t bytes) {
  return {reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), bytes};
}

Key random_key() {
  std::random_device random;
  const auto word = [&random] { return (std::uint64_t{random()} << 32U) | random(); };
  return {word(), word()};
}

bool only_parents_may_read() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope && scope == 1;
}

std::int64_t read_process(pid_t pid, std::span<const iovec> remote, std::span<std::byte> target) {
  const iovec local{target.data(), target.size()};
  const ssize_t moved = ::process_vm_readv(pid, &local, 1, remote.data(), remote.size(), 0);
  return moved >= 0 ? moved : -errno;
}

[[noreturn]] void throw_elsewhere(pid_t pid, const std::string& reason) {
  throw IoError(
      "process {} is not here: it has ended, or is on another host or in another PID namespace "
      "({})",
      pid, reason);
}

// All of it, or an error.
void read_whole(pid_t pid, std::uint64_t address, std::span<std::byte> target) {
  while (!target.empty()) {
    const iovec there = range_of(address, target.size());
    const std::int64_t got = read_process(pid, {&there, 1}, target);
    if (got == -EPERM || got == -EACCES || got == -ENOSYS)
      throw NotPermitted(
          "the system does not let this process read the memory of process {}; run all ranks of a "
          "host as one user in one container that permits process_vm_readv (Yama, seccomp): {}",
          pid, errno_text(static_cast<int>(-got)));
    if (got < 0) throw_elsewhere(pid, errno_text(static_cast<int>(-got)));
    if (got == 0) throw_elsewhere(pid, "nothing to read");
    address += static_cast<std::uint64_t>(got);
    target = target.subspan(static_cast<std::size_t>(got));
  }
}

}  // namespace

OfferedMemory::OfferedMemory(std::span<const std::span<const std::byte>> parts)
    : key_(random_key()) {
  for (const auto part : parts) parts_.push_back({address_of(part.data()), part.size()});
}

OfferedMemory::~OfferedMemory() {
  if (permitted_) ::prctl(PR_SET_PTRACER, 0UL, 0, 0, 0);
}

void OfferedMemory::permit_siblings() {
  const pid_t parent = ::getppid();
  if (parent <= 1 || !only_parents_may_read()) return;  // of 1 everybody is a child
  permitted_ = ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(parent), 0, 0, 0) == 0;
}

std::string OfferedMemory::to_text() const {
  return fmt::format("{} {} {} {} {} {}", ::getpid(), address_of(key_.data()), key_[0], key_[1],
                     address_of(parts_.data()), parts_.size());
}

ProcessMemory::ProcessMemory(const std::string& text) {
  const Offer offer = offer_from(text);
  pid_ = offer.pid;
  Key key{};
  read_whole(pid_, offer.key_at, std::as_writable_bytes(std::span(key)));
  if (key != offer.key) throw_elsewhere(pid_, "it has other memory");
  parts_.resize(offer.parts);
  read_whole(pid_, offer.parts_at, std::as_writable_bytes(std::span(parts_)));
  Bytes offset;
  for (const MemoryRange& part : parts_) {
    offsets_.push_back(offset);
    offset += Bytes(static_cast<std::int64_t>(part.bytes));
  }
  file_.emplace(fmt::format("/proc/{}/mem", pid_), File::Mode::kRead);
}

std::int64_t ProcessMemory::read_at(int /*fd*/, std::span<std::byte> target, Bytes offset) {
  // The part behind the last one that begins at `offset` or before it.
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), offset);
  std::array<iovec, kMostParts> remote{};
  std::size_t count = 0;
  std::size_t wanted = target.size();
  for (auto i = static_cast<std::size_t>(after - offsets_.begin());
       i <= parts_.size() && i > 0 && wanted > 0 && count < kMostParts; ++i) {
    const MemoryRange& part = parts_[i - 1];
    const std::size_t skipped = offset > offsets_[i - 1] ? (offset - offsets_[i - 1]).size() : 0;
    if (skipped >= part.bytes) continue;
    const std::size_t taken = std::min<std::size_t>(part.bytes - skipped, wanted);
    remote[count++] = range_of(part.address + skipped, taken);
    wanted -= taken;
  }
  if (count == 0) return 0;  // behind the end
  return read_process(pid_, std::span(remote).first(count), target);
}

std::int64_t ProcessMemory::write_at(int /*fd*/, std::span<const std::byte> /*source*/,
                                     Bytes /*offset*/) {
  return -EBADF;
}

}  // namespace strata::io
