#include "strata/offload/device_stage.h"

#include <algorithm>
#include <utility>

#include "strata/base/error.h"

namespace strata::offload {
namespace {

constexpr Bytes kAlignmentOnDevice = 256_B;
// Copies of some megabytes run at the link's speed.
constexpr Bytes kShareMax = 16_MiB;
// One share is worked on, one comes and one leaves; as many again, so that none of the three waits
// for another.
constexpr std::int64_t kSharesHeld = 6;

Bytes room_of_pieces(Bytes bytes) {
  return bytes + kAlignmentOnDevice * DeviceStage::kPieces;
}

}  // namespace

class DeviceStage::Copy final : public Lease {
 public:
  Copy(DeviceStage& stage, std::shared_ptr<Taken> taken, Lease* lease, std::span<std::byte> host,
       Access access)
      : stage_(stage), taken_(std::move(taken)), lease_(lease), host_(host), access_(access) {}
  ~Copy() override { stage_.take_back(*taken_, lease_, host_, access_); }
  std::span<std::byte> bytes() override { return stage_.bytes_of(*taken_, host_.size()); }

 private:
  DeviceStage& stage_;
  const std::shared_ptr<Taken> taken_;
  Lease* const lease_;  // null: host memory that stays
  const std::span<std::byte> host_;
  const Access access_;
};

DeviceStage::DeviceStage(device::Device& device, Bytes largest, LinkWatch& watch)
    : device_(device),
      watch_(watch),
      share_(std::min(largest, kShareMax)),
      memory_(device.allocate(room_of_pieces(share_) * kSharesHeld, memory::Kind::kStaging)),
      coming_(device.create_stream()),
      leaving_(device.create_stream()) {}

DeviceStage::~DeviceStage() {
  FirstError lost;  // a failed device runs nothing, and a destructor cannot report it
  lost.attempt([this] { coming_->synchronize(); });
  lost.attempt([this] { device_.compute_stream().synchronize(); });
  lost.attempt([this] { leaving_->synchronize(); });
}

void DeviceStage::begin() {
  coming_->wait_for(*device_.compute_stream().record());
}

std::unique_ptr<Lease> DeviceStage::bring(Lease& lease, std::span<std::byte> bytes, Access access) {
  return bring(&lease, bytes, access);
}

std::unique_ptr<Lease> DeviceStage::bring(std::span<const std::byte> host) {
  // Not written, since it is brought to be read.
  return bring(nullptr, {const_cast<std::byte*>(host.data()), host.size()}, Access::kRead);
}

std::unique_ptr<Lease> DeviceStage::bring(Lease* lease, std::span<std::byte> host, Access access) {
  throw_failure();
  std::shared_ptr<Taken> taken = take(Bytes(static_cast<std::int64_t>(host.size())));
  watch_.copy(Link::kUp, Bytes(host.size()), *coming_,
              [&] { device_.copy(bytes_of(*taken, host.size()), host, *coming_); });
  watch_.await_copies([&] { device_.compute_stream().wait_for(*coming_->record()); });
  if (lease != nullptr && access == Access::kRead) lease->used_in(*coming_);
  return std::make_unique<Copy>(*this, std::move(taken), lease, host, access);
}

void DeviceStage::join() {
  throw_failure();
  watch_.await_copies([&] { device_.compute_stream().wait_for(*leaving_->record()); });
}

// Copies leave the ring in the order in which they came: the oldest one lies where the next will.
std::shared_ptr<DeviceStage::Taken> DeviceStage::take(Bytes bytes) {
  const Bytes room = align_up(std::max(bytes, 1_B), kAlignmentOnDevice);
  const Bytes size(static_cast<std::int64_t>(memory_->bytes().size()));
  STRATA_ASSERT(room <= size);
  if (size < head_ + room) head_ = Bytes();
  auto taken = std::make_shared<Taken>(Taken{head_, head_ + room, false, nullptr});
  const auto in_the_way = [&](const std::shared_ptr<Taken>& other) {
    return std::max(other->begin, taken->begin) < std::min(other->end, taken->end);
  };
  while (std::ranges::any_of(taken_, in_the_way)) {
    const Taken& oldest = *taken_.front();
    STRATA_ASSERT(oldest.back);  // else more than a share is held
    if (oldest.free != nullptr) coming_->wait_for(*oldest.free);
    taken_.pop_front();
  }
  head_ = taken->end;
  taken_.push_back(taken);
  return taken;
}

std::span<std::byte> DeviceStage::bytes_of(const Taken& taken, std::size_t bytes) {
  return memory_->bytes().subspan(taken.begin.size(), bytes);
}

void DeviceStage::take_back(Taken& taken, Lease* lease, std::span<std::byte> host,
                            Access access) noexcept {
  taken.back = true;
  try {
    const std::unique_ptr<device::Event> worked = device_.compute_stream().record();
    leaving_->wait_for(*worked);
    if (access == Access::kReadWrite) {
      watch_.copy(Link::kDown, Bytes(host.size()), *leaving_,
                  [&] { device_.copy(host, bytes_of(taken, host.size()), *leaving_); });
      if (lease != nullptr) lease->used_in(*leaving_);
    }
    taken.free = leaving_->record();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void DeviceStage::throw_failure() {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

}  // namespace strata::offload
