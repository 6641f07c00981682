#include "strata/comm/peer/peer_collectives.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/peer/peer_link.h"
#include "strata/comm/peer/peer_reduction.h"

namespace strata::comm {
namespace {

constexpr Bytes kBroadcastPiece = 32_MiB;
// Up to here two copies by way of the host take less time than shared memory of the device to
// allocate, hand out and map.
constexpr Bytes kThroughHostMost = 256_KiB;

class PeerCollectives final : public Collectives {
 public:
  PeerCollectives(std::shared_ptr<device::Device> device, std::shared_ptr<Collectives> control,
                  const PeerOptions& options)
      : Collectives(control->rank(), among(kPeerTraits, control->rank(), control->world_size())),
        link_(std::make_shared<PeerLink>(std::move(device), std::move(control), options)),
        reductions_(std::make_shared<PeerReductions>(*link_)) {
    link_->buffers()->set_before_free([link = link_.get()] { link->wait_for_readers(); });
  }

  ~PeerCollectives() override {
    link_->wait_for_readers();
    link_->buffers()->set_before_free([device = &link_->device()] {
      try {
        device->compute_stream().synchronize();
      } catch (const std::exception&) {
        return;  // a device that is lost runs nothing
      }
    });
  }

  std::string_view name() const override { return "peer"; }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    link_->require_usable();
    return PeerBuffers::allocate(link_->buffers(), std::move(name), bytes, false);
  }
  std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    link_->require_usable();
    auto buffer = PeerBuffers::allocate(link_->buffers(), std::move(name), bytes, true);
    link_->map_ahead(*buffer);
    return buffer;
  }
  void unmap_freed() override { link_->unmap_freed(); }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override;

  std::unique_ptr<Work> finish_gathers() override {
    return std::make_unique<RoundWork>(link_, ++rounds_);
  }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    link_->require_usable();
    WorkTimes times;
    auto started = reductions_->start(reduction, tag, *records_times_ ? &times : nullptr);
    return std::make_unique<PeerWork>(link_, reductions_, std::move(started), std::move(times));
  }
  device::Stream* contribution_stream() override { return &link_->transfers(); }
  std::unique_ptr<Inbox> make_inbox(std::string name, Bytes bytes) override {
    return std::make_unique<PeerInbox>(link_, reductions_, allocate(std::move(name), bytes),
                                       records_times_);
  }
  void record_times(bool on) override { *records_times_ = on; }

  void all_reduce(std::span<double> values, ReduceOp op) override {
    const std::string what = fmt::format("all-reduce of {} values", values.size());
    link_->agree_on_operation(what);
    link_->transfers().synchronize();  // shards may change when all ranks have come here
    link_->controlled(what, [&] { link_->control().all_reduce(values, op); });
  }

  void all_gather_on_device(std::span<std::byte> all, std::span<const std::byte> mine) override {
    link_->exchange(all, mine);
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    const std::string what = describe_broadcast(Bytes(bytes.size()), root, world_size());
    link_->agree_on_operation(what);
    if (bytes.empty() || world_size() == 1) return;
    if (link_->device().host_accessible(bytes.data())) {
      link_->controlled(what, [&] { link_->control().broadcast(bytes, root); });
    } else if (bytes.size() <= kThroughHostMost.size()) {
      broadcast_through_host(bytes, root, what);
    } else {
      broadcast_on_device(bytes, root);
    }
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return link_->controlled("exchange of texts",
                             [&] { return link_->control().all_gather_text(text); });
  }

  void barrier() override {
    reductions_->wait_for_readers(reductions_->count());
    link_->barrier();
  }

  // Sends bytes from every rank to every other; throws on every rank where some do not arrive.
  void prove();

  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    link_->control().announce_departure(words);
  }
  void all_left() noexcept override { link_->control().all_left(); }

  void require_usable() override {
    link_->require_usable();
    link_->controlled("asking for the peers", [&] { link_->control().require_usable(); });
  }

  void end(Ending ending, std::string_view reason) noexcept override { link_->end(ending, reason); }

 private:
  void broadcast_on_device(std::span<std::byte> bytes, int root);
  void broadcast_through_host(std::span<std::byte> bytes, int root, const std::string& what);

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<PeerReductions> reductions_;
  std::uint32_t rounds_ = 0;  // of gathers
  std::shared_ptr<bool> records_times_ = std::make_shared<bool>(false);
};

std::unique_ptr<Work> PeerCollectives::all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                                  std::string_view tag) {
  link_->require_usable();
  const BulkOperation gather = describe_gather(slices, flat, rank(), world_size(), tag);
  if (slices.buffer == nullptr)
    throw UsageError(fmt::format("{} needs a buffer, since peers read it; got none", gather.what));
  if (!link_->buffers()->number_of(*slices.buffer)) {
    throw UsageError(
        fmt::format("the buffer of an all_gather must be allocated by the same "
                    "collectives ('{}' of '{}' is not)",
                    slices.buffer->name(), tag));
  }
  const std::size_t bytes = slices.slice_bytes.size();
  if (bytes == 0) return std::make_unique<PeerWork>(link_, nullptr);
  const std::string key = PeerBuffers::key_of_name(slices.buffer->name());
  std::vector<const std::byte*> sources;
  for (int turn = 0; turn < link_->peers(); ++turn) {
    const int from = link_->peer(turn);
    sources.push_back(link_->reach(from, key, slices.buffer->name(),
                                   slices.first_offset + slices.stride * from, slices.slice_bytes,
                                   gather.what));
  }
  device::Device& device = link_->device();
  device::Stream& stream = link_->transfers();
  stream.wait_for(*device.compute_stream().record());
  const auto target = [&](int from) {
    return flat.subspan(static_cast<std::size_t>(from) * bytes, bytes);
  };
  WorkTimes times;
  if (*records_times_) times.begin = stream.record_timed();
  for (int turn = 0; turn < link_->peers(); ++turn) {
    device.copy(target(link_->peer(turn)), {sources[static_cast<std::size_t>(turn)], bytes},
                stream);
  }
  if (target(rank()).data() != gather.source.data())
    device.copy(target(rank()), gather.source, stream);
  if (*records_times_) times.end = stream.record_timed();
  return std::make_unique<PeerWork>(link_, stream.record(), std::move(times));
}

// Piece by piece through shared memory of the root.
void PeerCollectives::broadcast_on_device(std::span<std::byte> bytes, int root) {
  device::Device& device = link_->device();
  device::Stream& compute = device.compute_stream();
  device::Stream& transfers = link_->transfers();
  const std::size_t piece = std::min(bytes.size(), kBroadcastPiece.size());
  const auto buffer = allocate("broadcast", Bytes(rank() == root ? piece : 1));
  for (std::size_t at = 0; at < bytes.size(); at += piece) {
    const std::span<std::byte> part = bytes.subspan(at, std::min(piece, bytes.size() - at));
    if (rank() == root) device.copy(buffer->local().first(part.size()), part, compute);
    barrier();
    if (rank() != root) {
      const std::byte* source = link_->reach(root, PeerBuffers::key_of_name("broadcast"),
                                             "broadcast", Bytes(), Bytes(part.size()), "broadcast");
      transfers.wait_for(*compute.record());  // which may still use what is replaced
      device.copy(part, {source, part.size()}, transfers);
    }
    compute.wait_for(*transfers.record());  // so the others know by the barrier that it is read
    barrier();
    compute.wait_for(*transfers.record());  // which waits for all at the barrier
  }
  barrier();
}

void PeerCollectives::broadcast_through_host(std::span<std::byte> bytes, int root,
                                             const std::string& what) {
  device::Device& device = link_->device();
  device::Stream& compute = device.compute_stream();
  std::vector<std::byte> copy(bytes.size());
  if (rank() == root) {
    device.copy(copy, bytes, compute);
    compute.synchronize();
  }
  link_->controlled(what, [&] { link_->control().broadcast(copy, root); });
  if (rank() == root) return;
  device.copy(bytes, copy, compute);
  compute.synchronize();
}

void PeerCollectives::prove() {
  constexpr std::size_t kBytes = 4096;
  const auto byte_of = [](std::size_t rank) { return static_cast<std::byte>(rank * 7 + 1); };
  device::Device& device = link_->device();
  std::unique_ptr<SharedBuffer> buffer;
  std::unique_ptr<device::Memory> flat;
  std::vector<std::byte> all(kBytes * static_cast<std::size_t>(world_size()));
  const auto attempt = [&](const auto& step) {
    agree_all_can(all_gather_text(error_of(step)), "read its peers' memory", link_->names());
  };
  attempt([&] {
    buffer = allocate("proof", Bytes(kBytes));
    flat = device.allocate_uncharged(Bytes(all.size()));
    const std::vector<std::byte> mine(kBytes, byte_of(static_cast<std::size_t>(rank())));
    device.copy(buffer->local(), mine, device.compute_stream());
    device.compute_stream().synchronize();
  });
  attempt([&] { link_->map_from_all("proof", Bytes(kBytes)); });
  barrier();
  attempt([&] {
    all_gather({buffer.get(), Bytes(), Bytes(), Bytes(kBytes)}, flat->bytes(), "proof")->wait();
    device.copy(all, flat->bytes(), device.compute_stream());
    device.compute_stream().synchronize();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i] == byte_of(i / kBytes)) continue;
      throw CommError(fmt::format("what rank {} wrote does not arrive",
                                  link_->names().of(static_cast<int>(i / kBytes))));
    }
  });
  barrier();
}

}  // namespace

std::unique_ptr<Collectives> make_peer_collectives(std::shared_ptr<device::Device> device,
                                                   std::shared_ptr<Collectives> control,
                                                   const PeerOptions& options) {
  auto collectives =
      std::make_unique<PeerCollectives>(std::move(device), std::move(control), options);
  collectives->prove();
  return collectives;
}

}  // namespace strata::comm
