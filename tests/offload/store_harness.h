// Stores as the conformance tests make them, and helpers of several tests of stores.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/late_device.h"
#include "device/limited_device.h"
#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/device/cpu_device.h"
#include "strata/io/thread_engine.h"
#include "strata/offload/block_file.h"
#include "strata/offload/make_store.h"
#include "strata/offload/nvme_store.h"

namespace strata::offload {

// Leases that the host reads and writes by itself.
struct PlainAccess {
  static void write(std::span<std::byte> target, std::span<const std::byte> source) {
    std::copy(source.begin(), source.end(), target.begin());
  }
  static void read(std::span<std::byte> target, std::span<const std::byte> source) {
    write(target, source);
  }
  static void finish() {}
};

// A device beside a host with no more memory than this.
template <typename Base, std::int64_t kBytes>
class OnSmallHost final : public Base {
 public:
  std::unique_ptr<device::HostMemory> allocate_host(Bytes bytes, memory::Kind kind) override {
    if (this->ledger()->held(memory::Tier::kHost) + bytes > Bytes(kBytes))
      throw OutOfMemoryError(fmt::format("{} wanted", to_string(bytes)));
    return Base::allocate_host(bytes, kind);
  }
};

// Leases that a device's stream reads and writes, some time later.
template <typename Device>
struct LateAccessOn {
  void write(std::span<std::byte> target, std::span<const std::byte> source) {
    device.copy(target, source, device.compute_stream());
  }
  void read(std::span<std::byte> target, std::span<const std::byte> source) {
    device.copy(target, source, device.compute_stream());
  }
  void finish() { device.compute_stream().synchronize(); }

  Device device;
};
using LateAccess = LateAccessOn<device::LateDevice>;

// A file in a folder of its own below this one.
inline std::unique_ptr<BlockFile> file_below(std::shared_ptr<io::IoEngine> io,
                                             const testing::TemporaryFolder& folder) {
  std::vector<std::unique_ptr<SwapFolder>> folders;
  folders.push_back(std::make_unique<SwapFolder>(folder.path(), /*rank=*/0));
  return make_block_file(std::move(io), std::move(folders));
}

// A drive with no more space than this.
class LimitedFile final : public BlockFile {
 public:
  LimitedFile(std::unique_ptr<BlockFile> file, Bytes limit)
      : file_(std::move(file)), limit_(limit) {}
  const std::string& path() const override { return file_->path(); }
  void grow(Bytes size) override {
    if (size > limit_) throw OutOfMemoryError(fmt::format("{} wanted", to_string(size - size_)));
    file_->grow(size);
    size_ = size;
  }
  std::unique_ptr<io::Transfer> read(Bytes offset, std::span<std::byte> target) override {
    return file_->read(offset, target);
  }
  std::unique_ptr<io::Transfer> write(Bytes offset, std::span<const std::byte> source) override {
    return file_->write(offset, source);
  }
  std::vector<DriveWrites> drive_writes() const override { return file_->drive_writes(); }

 private:
  const std::unique_ptr<BlockFile> file_;
  const Bytes limit_;
  Bytes size_;
};

struct HostHarness : PlainAccess {
  static constexpr memory::Tier kTier = memory::Tier::kHost;
  static constexpr Bytes kRoom = 1_MiB;

  std::unique_ptr<StateStore> make() { return make_memory_store(memory::Tier::kHost, device); }
  Bytes charged(memory::Kind kind) const { return device.ledger()->held(kTier, kind); }

  OnSmallHost<device::CpuDevice, kRoom.value> device;
};

struct PinnedHostHarness : LateAccessOn<OnSmallHost<device::LateDevice, (1_MiB).value>> {
  static constexpr memory::Tier kTier = memory::Tier::kHost;
  static constexpr Bytes kRoom = 1_MiB;

  std::unique_ptr<StateStore> make() { return make_memory_store(memory::Tier::kHost, device); }
  Bytes charged(memory::Kind kind) const { return device.ledger()->held(kTier, kind); }
};

struct CpuDeviceHarness : PlainAccess {
  static constexpr memory::Tier kTier = memory::Tier::kDevice;
  static constexpr Bytes kRoom = 1_MiB;

  std::unique_ptr<StateStore> make() { return make_memory_store(memory::Tier::kDevice, device); }
  Bytes charged(memory::Kind kind) const { return device.ledger()->held(kTier, kind); }

  device::LimitedDevice device{kRoom};
};

struct LateDeviceHarness : LateAccess {
  static constexpr memory::Tier kTier = memory::Tier::kDevice;
  static constexpr Bytes kRoom = 1_MiB;

  std::unique_ptr<StateStore> make() { return make_memory_store(memory::Tier::kDevice, device); }
  Bytes charged(memory::Kind kind) const { return device.ledger()->held(kTier, kind); }
};

// Makes stores on a file, staged through kPages pages.
template <int kPages, bool kVerify>
class NvmeMaker {
 public:
  static constexpr memory::Tier kTier = memory::Tier::kNvme;
  static constexpr Bytes kRoom = 1_MiB;

 protected:
  std::unique_ptr<StateStore> make_on(device::Device& device) {
    auto file = std::make_unique<LimitedFile>(file_below(io_, folder_), kRoom);
    auto arena = std::make_shared<StagingArena>(device, kPartAlignment * kPages);
    return make_nvme_store(
        device,
        NvmeStoreOptions{.arena = std::move(arena), .file = std::move(file), .verify = kVerify});
  }

 private:
  testing::TemporaryFolder folder_;
  std::shared_ptr<io::IoEngine> io_ =
      std::make_shared<io::ThreadEngine>(io::EngineOptions{.threads = 2});
};

template <int kPages, bool kVerify = false>
struct NvmeHarness : PlainAccess, NvmeMaker<kPages, kVerify> {
  std::unique_ptr<StateStore> make() { return this->make_on(device); }
  Bytes charged(memory::Kind kind) const { return device.ledger()->held(this->kTier, kind); }

  device::CpuDevice device;
};

template <int kPages, bool kVerify = false>
struct LateNvmeHarness : LateAccess, NvmeMaker<kPages, kVerify> {
  std::unique_ptr<StateStore> make() { return this->make_on(device); }
  Bytes charged(memory::Kind kind) const { return device.ledger()->held(this->kTier, kind); }
};

}  // namespace strata::offload
