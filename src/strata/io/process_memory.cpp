#include "strata/io/process_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "strata/base/error.h"
#include "strata/io/errno_text.h"

namespace strata::io {
namespace {

constexpr std::size_t kMostParts = 64;  // of one call

bool only_parents_may_read() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope && scope == 1;
}

std::uintptr_t address_of(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}

std::array<std::uint64_t, 2> random_key() {
  std::random_device random;
  const auto word = [&random] { return (std::uint64_t{random()} << 32U) | random(); };
  return {word(), word()};
}

std::int64_t read_process(pid_t pid, std::span<const iovec> remote, std::span<std::byte> target) {
  const iovec local{target.data(), target.size()};
  const ssize_t moved = ::process_vm_readv(pid, &local, 1, remote.data(), remote.size(), 0);
  return moved >= 0 ? moved : -errno;
}

}  // namespace

OfferedMemory::OfferedMemory(std::vector<std::span<const std::byte>> parts)
    : parts_(std::move(parts)), key_(random_key()) {
  if (only_parents_may_read())
    permitted_ = ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(::getppid()), 0, 0, 0) == 0;
}

OfferedMemory::~OfferedMemory() {
  if (permitted_) ::prctl(PR_SET_PTRACER, 0UL, 0, 0, 0);
}

std::string OfferedMemory::to_text() const {
  nlohmann::json text = {{"pid", ::getpid()}, {"key_at", address_of(key_.data())}, {"key", key_}};
  for (const std::span<const std::byte> part : parts_)
    text["parts"].push_back({address_of(part.data()), part.size()});
  return text.dump();
}

ProcessMemory::Offer ProcessMemory::Offer::from_text(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text);
  Offer offer{json["pid"], json["key_at"], json["key"], {}};
  Bytes offset;
  if (json.contains("parts")) {
    for (const auto& part : json["parts"]) {
      offer.parts.push_back(
          {offset, part[0].get<std::uintptr_t>(), Bytes(part[1].get<std::int64_t>())});
      offset += offer.parts.back().bytes;
    }
  }
  return offer;
}

ProcessMemory::ProcessMemory(const std::string& text) : ProcessMemory(Offer::from_text(text)) {}

ProcessMemory::ProcessMemory(Offer offer)
    : pid_(offer.pid),
      parts_(std::move(offer.parts)),
      file_(fmt::format("/proc/{}/mem", pid_), File::Mode::kRead) {
  std::array<std::uint64_t, 2> key{};
  const iovec there{reinterpret_cast<void*>(offer.key_address), sizeof(key)};
  const std::int64_t got = read_process(pid_, {&there, 1}, std::as_writable_bytes(std::span(key)));
  if (got < 0) {
    throw IoError(fmt::format(
        "cannot read the memory of another process; run all ranks of a host as one user in one "
        "container: path={} {}",
        file_.path(), errno_text(static_cast<int>(-got))));
  }
  if (key != offer.key) {
    throw IoError(fmt::format(
        "the process of this number is another one: it is on another host, or in another PID "
        "namespace: path={}",
        file_.path()));
  }
}

std::int64_t ProcessMemory::read_at(int /*fd*/, std::span<std::byte> target, Bytes offset) {
  auto part = std::partition_point(parts_.begin(), parts_.end(), [&](const Part& candidate) {
    return candidate.offset + candidate.bytes <= offset;
  });
  std::array<iovec, kMostParts> remote{};
  std::size_t count = 0;
  Bytes wanted(target.size());
  for (; part != parts_.end() && wanted > Bytes() && count < kMostParts; ++part) {
    const Bytes skipped = offset > part->offset ? offset - part->offset : Bytes();
    const Bytes taken = std::min(part->bytes - skipped, wanted);
    if (taken == Bytes()) continue;
    remote[count++] = {reinterpret_cast<void*>(part->address + skipped.size()), taken.size()};
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
