// One rank's end of the peer collectives: its shared memory and what it sees of its peers', the
// flags, the streams, and the one failure that ends them all.
// Threads: the rank's, but for what PeerChannel::Service says. Ownership: shared by the collectives
// and the works that they started. Errors: CommError, the same at every later call.
#pragma once

#include <fmt/core.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/peer/peer_buffers.h"
#include "strata/comm/peer/peer_channel.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/comm/peer/peer_flags.h"
#include "strata/memory/host_buffer.h"

namespace strata::comm {

class PeerLink final : public PeerChannel::Service {
 public:
  // Collective, and throws on every rank or on none.
  PeerLink(std::shared_ptr<device::Device> device, std::shared_ptr<Collectives> control,
           const PeerOptions& options);
  ~PeerLink() override;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const RankNames& names() const { return names_; }
  Collectives& control() { return *control_; }
  device::Device& device() { return *device_; }
  const std::shared_ptr<PeerBuffers>& buffers() { return buffers_; }
  device::Flag& flag(PeerFlags::Kind kind, int from, int to) { return flags_.at(kind, from, to); }
  // Later work of the stream runs when the peer's flag has reached `value`. A peer that lets it
  // wait for longer than the timeout ends this link, and with it the wait.
  void wait_for(PeerFlags::Kind kind, int peer, std::uint32_t value, device::Stream& stream) {
    watch_.wait_for(*device_, kind, peer, flag(kind, peer, rank_), value, stream);
  }
  // In the order in which this rank turns to peers, so that not all read from the same one.
  int peer(int turn) const { return (rank_ + 1 + turn) % world_size_; }
  int peers() const { return world_size_ - 1; }

  // Carries gathers, contributions and reductions: all that waits for peers or for the model. A
  // second stream that waits would make every kernel launch on this device longer by half.
  device::Stream& transfers() { return *transfers_; }
  // Barriers have the compute stream wait for it.
  void note_reduction(std::unique_ptr<device::Event> added) { reduced_ = std::move(added); }

  // Bytes [offset, offset + bytes) of a peer's buffer; waits for it to be allocated. `what` says in
  // errors what for.
  const std::byte* reach(int rank, const std::string& key, std::string_view name, Bytes offset,
                         Bytes bytes, std::string_view what);

  // Peers' buffers of this name are mapped as they grow, beside what this rank does.
  void map_ahead(const SharedBuffer& buffer);
  // Maps a buffer that every rank has, and throws where that cannot be; nothing has failed then.
  void map_from_all(const std::string& name, Bytes bytes);
  void unmap_freed();  // of Collectives

  void require_usable();
  // The failure of this rank; the peers hear of it.
  [[noreturn]] void fail(const std::string& message);
  // Collectives::end().
  void end(Ending ending, std::string_view reason) noexcept;
  // A call of the control plane; what it throws is the end of this link, too.
  template <typename Call>
  auto controlled(std::string_view what, Call&& call) -> decltype(call()) {
    require_usable();
    try {
      return std::forward<Call>(call)();
    } catch (const CommError& error) {
      fail(fmt::format("{}: {}", what, error.what()));
    }
  }
  // comm::agree_on_operation() on the control plane.
  std::vector<std::uint64_t> agree_on_operation(const std::string& what, std::uint64_t number = 0);
  // Work that a rank's streams get after it runs when the work that every rank's streams held
  // before it is done.
  void barrier();
  // Exchanges device memory in the compute stream, for which this is a barrier.
  void exchange(std::span<std::byte> all, std::span<const std::byte> mine);
  // Until peers have passed the last barrier in their streams, too.
  void wait_for_readers() noexcept;

  std::optional<SharedParts> share(const std::string& key, std::size_t first) override;
  void failed(const std::string& message) noexcept override;
  std::optional<LatePeer> late_peer() override { return watch_.look(); }

 private:
  FileDescriptor make_flags_file();     // of rank 0, which gives it to the others
  FileDescriptor ask_for_flags_file();  // of the other ranks
  void map_flags(FileDescriptor file);
  Bytes flags_bytes() const;
  // The first one counts. `told`: what peers hear after this rank's name.
  void set_failure(std::string message, std::string told) noexcept;
  void stop(std::string message, std::string told) noexcept;
  // Tells the peers, once. A rank that ends because another one failed says so before it ends, so
  // that no error names it as the cause.
  void pass_on_failure() noexcept;

  std::shared_ptr<device::Device> device_;
  std::shared_ptr<Collectives> control_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  RankNames names_;
  FileDescriptor flags_file_;  // rank 0's
  memory::MappedMemory flags_memory_;
  std::unique_ptr<device::HostRegistration> flags_pinned_;
  PeerFlags flags_;
  FlagWatch watch_;
  std::shared_ptr<PeerBuffers> buffers_;
  std::uint32_t barriers_ = 0;
  std::uint32_t exchanges_ = 0;
  bool passed_on_ = false;

  std::atomic<bool> failed_ = false;
  std::atomic<bool> flags_mapped_ = false;
  std::mutex mutex_;
  std::string failure_;  // guarded by mutex_, like the next
  std::string told_;
  std::unique_ptr<device::Stream> transfers_;
  std::unique_ptr<device::Event> reduced_;  // the last reduction; null: none
  std::unique_ptr<PeerChannel> channel_;    // its thread uses those before it
  std::unique_ptr<PeerMapper> mapper_;      // and its thread those
};

}  // namespace strata::comm
