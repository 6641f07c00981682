// The memory of saves beside training.
#include <gmock/gmock.h>

#include <utility>

#include "engine/checkpoint/training_ranks.h"
#include "io/temporary_folder.h"
#include "strata/engine/checkpoint/training_saver.h"
#include "strata/io/thread_engine.h"

namespace strata::engine {
namespace {

// Allocates expected memory at once, as a device does that pins memory.
class PinningDevice final : public device::CpuDevice {
 public:
  void expect_host(Bytes bytes, memory::Kind kind) override {
    expected_.reset();
    expected_ = CpuDevice::allocate_host(bytes, kind);
  }
  std::unique_ptr<device::HostMemory> allocate_host(Bytes bytes, memory::Kind kind) override {
    if (expected_ != nullptr && Bytes(expected_->bytes().size()) == bytes)
      return std::exchange(expected_, nullptr);
    return CpuDevice::allocate_host(bytes, kind);
  }

 private:
  std::unique_ptr<device::HostMemory> expected_;
};

// The parameter says whether the saver was told the size of its buffers.
class AsyncSaverMemory : public ::testing::TestWithParam<bool> {};

TEST_P(AsyncSaverMemory, IsHeldOnceWhateverIsSavedBesideTheShards) {
  const testing::TemporaryFolder folder;
  const auto outcomes = testing::on_ranks(1, [&](const auto& ranks) {
    testing::TrainedRank rank(ranks, DType::kFloat32, 3, "", std::make_shared<PinningDevice>());
    rank.set_states(1);
    const std::vector<std::byte> buffer((80_MiB).size());
    const auto held = [&] {
      return rank.device->ledger()->held(memory::Tier::kHost, memory::Kind::kStaging);
    };
    AsyncSaver saver(*rank.engine, std::make_shared<io::ThreadEngine>(),
                     std::make_shared<io::FolderCalls>());
    saver.expect(GetParam() ? Bytes(buffer.size()) : Bytes());
    SaveRequest request;
    request.folder = folder.path();
    request.tag = "tag";
    request.training = "{}";
    request.content.tensors.push_back(
        {{"table", format::TensorRole::kBuffer, {20 << 20}, DType::kFloat32, false, {}},
         buffer,
         0});
    saver.start(request);
    EXPECT_GE(held(), 80_MiB);
    EXPECT_LE(held(), copied_bytes(*rank.engine, Bytes(buffer.size())));
    saver.wait();
    request.tag = "next";
    saver.start(request);
    saver.wait();
    EXPECT_LE(held(), copied_bytes(*rank.engine, Bytes(buffer.size())));
  });
  EXPECT_THAT(outcomes, ::testing::Each(""));
}

INSTANTIATE_TEST_SUITE_P(Told, AsyncSaverMemory, ::testing::Bool());

}  // namespace
}  // namespace strata::engine
