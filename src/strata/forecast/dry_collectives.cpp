#include "strata/forecast/dry_collectives.h"

#include <utility>

#include "strata/memory/host_buffer.h"

namespace strata::forecast {
namespace {

// Addresses that are never accessed.
class DryBuffer final : public comm::SharedBuffer {
 public:
  DryBuffer(std::string name, Bytes bytes) : name_(std::move(name)), memory_(bytes) {}
  std::span<std::byte> local() override { return memory_.bytes(); }
  const std::string& name() const override { return name_; }

 private:
  std::string name_;
  memory::HostBuffer memory_;
};

class DryWork final : public comm::Work {
 public:
  bool done() override { return over_; }
  void wait() override { over_ = true; }

 private:
  bool over_ = false;
};

class DryInbox final : public comm::Inbox {
 public:
  explicit DryInbox(Bytes bytes) : ring_(bytes) {}
  void expect(std::span<const Bytes> contributions) override { ring_.expect(contributions); }
  bool writable(std::size_t index) const override { return ring_.after(index).has_value(); }
  void write(std::size_t, Numel, std::span<const std::byte>, DType) override {}
  void write_zero(std::size_t, Numel, Numel, DType) override {}
  std::unique_ptr<comm::Work> reduce(std::size_t index, const comm::Reduction&,
                                     std::string_view) override {
    ring_.begun(index, ++begun_);
    return std::make_unique<DryWork>();
  }

 private:
  comm::InboxRing ring_;
  std::uint32_t begun_ = 0;
};

class DryCollectives final : public comm::Collectives {
 public:
  DryCollectives(const comm::Traits& traits, std::shared_ptr<device::Device> device)
      : Collectives(0, traits),
        device_(std::move(device)),
        contributions_(device_->create_stream()) {}

  std::string_view name() const override { return "dry"; }
  device::Stream* contribution_stream() override {
    return traits().has_contribution_stream ? contributions_.get() : nullptr;
  }

  std::unique_ptr<comm::Inbox> make_inbox(std::string, Bytes bytes) override {
    if (!traits().has_inbox) return nullptr;
    return std::make_unique<DryInbox>(bytes);
  }

  std::unique_ptr<comm::SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return std::make_unique<DryBuffer>(std::move(name), bytes);
  }
  std::unique_ptr<comm::Work> all_gather(const comm::SliceMap&, std::span<std::byte>,
                                         std::string_view) override {
    return std::make_unique<DryWork>();
  }
  std::unique_ptr<comm::Work> reduce_scatter(const comm::Reduction&, std::string_view) override {
    return std::make_unique<DryWork>();
  }
  void all_reduce(std::span<double>, comm::ReduceOp) override {}
  void all_gather_on_device(std::span<std::byte>, std::span<const std::byte>) override {}
  void broadcast(std::span<std::byte>, int) override {}
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return std::vector<std::string>(static_cast<std::size_t>(world_size()), text);
  }
  void barrier() override {}
  void require_usable() override {}
  void end(comm::Ending, std::string_view) noexcept override {}

 private:
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> contributions_;
};

}  // namespace

std::unique_ptr<comm::Collectives> make_dry_collectives(const comm::Traits& traits,
                                                        std::shared_ptr<device::Device> device) {
  return std::make_unique<DryCollectives>(traits, std::move(device));
}

}  // namespace strata::forecast
