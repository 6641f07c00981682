#include "strata/offload/make_store.h"

#include <fmt/format.h>

#include <utility>

#include "strata/base/error.h"
#include "strata/io/engine_choice.h"
#include "strata/offload/memory_store.h"
#include "strata/offload/nvme_store.h"
#include "strata/offload/swap_folder.h"

namespace strata::offload {
namespace {

class DryTransfer final : public io::Transfer {
 public:
  bool done() override { return true; }
  void wait() override {}
};

class DryFile final : public BlockFile {
 public:
  const std::string& path() const override { return path_; }
  void grow(Bytes) override {}
  std::unique_ptr<io::Transfer> read(Bytes, std::span<std::byte>) override {
    return std::make_unique<DryTransfer>();
  }
  std::unique_ptr<io::Transfer> write(Bytes, std::span<const std::byte>) override {
    return std::make_unique<DryTransfer>();
  }

 private:
  std::string path_ = "nowhere";
};

std::unique_ptr<NvmeStore> drive_store(const StatePlace& place, device::Device& device,
                                       std::unique_ptr<BlockFile> file) {
  NvmeStoreOptions options;
  options.arena = std::make_shared<StagingArena>(device, place.budget);
  options.file = std::move(file);
  options.verify = place.verify;
  return std::make_unique<NvmeStore>(device, std::move(options));
}

std::shared_ptr<StateStore> memory_store(const StatePlace& place, device::Device& device) {
  if (place.tier == memory::Tier::kDevice) return MemoryStore::on_device(device);
  HostStoreOptions options;
  options.device = &device;
  return MemoryStore::on_host(std::move(options));
}

}  // namespace

MadeStore make_state_store(const StatePlace& place, device::Device& device, int rank) {
  if (place.tier != memory::Tier::kNvme) return {memory_store(place, device), ""};
  auto folder = std::make_unique<SwapFolder>(place.folder, rank);
  io::ChosenEngine io = io::make_io_engine();
  std::string remark = folder->remark();
  if (!io.refused.empty()) remark += fmt::format("{}{}", remark.empty() ? "" : "; ", io.refused);
  return {drive_store(place, device, make_block_file(std::move(io.engine), std::move(folder))),
          std::move(remark)};
}

std::shared_ptr<StateStore> make_dry_store(const StatePlace& place, device::Device& device) {
  if (place.tier != memory::Tier::kNvme) return memory_store(place, device);
  return drive_store(place, device, std::make_unique<DryFile>());
}

}  // namespace strata::offload
